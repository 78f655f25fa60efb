/* What a decoding batch does between its matrix products; local_kernel.py compiles it.
 *
 * agentrl_layer: one layer's attention in one call: norms and rotation of queries and keys, storing of keys and values on
 * their shelves, and a softmax over just the positions that each token sees. agentrl_draw: a token from each row of logits.
 *
 * The batch is a list of tokens; a row has one (it decodes) or several (it catches up). Row r's own keys and values lie in
 * row slot[r] of shelf[r]; what it begins with in common with others in row base_slot[r] of shelf base[r], base_length[r]
 * positions. A shelf is [rows, kv_heads, length, dim] float32. Plain C; the compiler is relied on to make vectors of it.
 */
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int32_t tokens, heads, kv_heads, dim, window, threads, longest;
    float scale, eps;
    const int32_t *row, *rotation, *position, *place;          /* [tokens] */
    const int32_t *shelf, *slot, *base, *base_slot, *base_length; /* [rows] */
    const int32_t *length;                                     /* [shelves] */
} Plan;

#define INLINE static inline __attribute__((always_inline))

/* Memory that always begins alike: where vectors begin decides the order of sums, and so their last bits. */
static void *room(size_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }

/* exp of what is not positive, to about 1e-7: Cody and Waite's reduction, a Taylor polynomial. NaN stays NaN. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t i; float f; } two;
    two.i = ((int32_t)n + 127) << 23;
    return p * two.f;
}

/* The largest of some numbers, sixteen at a time: a plain loop would be no vectors, since it must mind NaN. */
INLINE float highest(const float *x, int count) {
    float lanes[16], top = x[0];
    int n = 0;
    if (count >= 16) {
        for (int i = 0; i < 16; i++) lanes[i] = x[i];
        for (n = 16; n + 16 <= count; n += 16)
            for (int i = 0; i < 16; i++) lanes[i] = x[n + i] > lanes[i] ? x[n + i] : lanes[i];
        for (int i = 0; i < 16; i++) top = lanes[i] > top ? lanes[i] : top;
    }
    for (; n < count; n++) top = x[n] > top ? x[n] : top;
    return top;
}

/* scores[g * stride + t] = q[g] · keys[t]; the values, which are read next, are fetched meanwhile */
INLINE void dots(const float *q, const float *keys, const float *values, int count, int dim, int groups, float *scores,
                 int stride) {
    for (int t = 0; t < count; t++) {
        for (int i = 0; i < dim; i += 16) __builtin_prefetch(values + (int64_t)t * dim + i);
        for (int g = 0; g < groups; g++) {
            float sum = 0.0f;
            for (int i = 0; i < dim; i++) sum += q[g * dim + i] * keys[(int64_t)t * dim + i];
            scores[g * stride + t] = sum;
        }
    }
}

/* out[g] += Σ_t weights[g * stride + t] values[t] */
INLINE void sums(const float *weights, const float *values, int count, int dim, int groups, float *out, int stride) {
    float held[4 * 128];
    for (int i = 0; i < groups * dim; i++) held[i] = out[i];
    for (int t = 0; t < count; t++)
        for (int g = 0; g < groups; g++)
            for (int i = 0; i < dim; i++) held[g * dim + i] += weights[g * stride + t] * values[(int64_t)t * dim + i];
    for (int i = 0; i < groups * dim; i++) out[i] = held[i];
}

typedef struct { const float *keys, *values; int count; } Stretch;

/* Attention of `groups` queries of one head over some stretches of keys and values. */
INLINE void attend(const float *q, const Stretch *stretch, int dim, int groups, float *scores, float *out) {
    int total = stretch[0].count + stretch[1].count;
    for (int s = 0, at = 0; s < 2; at += stretch[s].count, s++)
        dots(q, stretch[s].keys, stretch[s].values, stretch[s].count, dim, groups, scores + at, total);
    for (int g = 0; g < groups; g++) {
        float *own = scores + (int64_t)g * total, top = highest(own, total), sum = 0.0f;
        for (int t = 0; t < total; t++) sum += own[t] = exponential(own[t] - top);
        for (int t = 0; t < total; t++) own[t] *= 1.0f / sum;
    }
    for (int i = 0; i < groups * dim; i++) out[i] = 0.0f;
    for (int s = 0, at = 0; s < 2; at += stretch[s].count, s++)
        sums(scores + at, stretch[s].values, stretch[s].count, dim, groups, out, total);
}

#define SIZES(dim, groups) attend(q, stretch, dim, groups, scores, out)
#define GROUPS(dim)                                                                    \
    (groups == 4 ? SIZES(dim, 4) : groups == 3 ? SIZES(dim, 3) : groups == 2 ? SIZES(dim, 2) : SIZES(dim, 1))

/* Constants for the usual sizes, so that loops are unrolled and sums stay in registers. */
static void attend_some(const float *q, const Stretch *stretch, int dim, int groups, float *scores, float *out) {
    if (dim == 32) GROUPS(32);
    else if (dim == 64) GROUPS(64);
    else if (dim == 128) GROUPS(128);
    else for (int g = 0; g < groups; g++) attend(q + g * dim, stretch, dim, 1, scores, out + g * dim);
}

/* Norm (where there is one) and rotation of one head, in place: x · cos + rotate_half(x) · sin. */
INLINE void turn(float *x, const float *norm, float eps, const float *cos, const float *sin, int dim) {
    if (norm) {
        float square = 0.0f;
        for (int i = 0; i < dim; i++) square += x[i] * x[i];
        float by = 1.0f / __builtin_sqrtf(square / (float)dim + eps);
        for (int i = 0; i < dim; i++) x[i] *= by * norm[i];
    }
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

static void store(const Plan *p, int token, float *mixed, const float *cos, const float *sin, const float *q_norm,
                  const float *k_norm, float *const *keys, float *const *values) {
    int dim = p->dim, row = p->row[token], length = p->length[p->shelf[row]];
    const float *c = cos + (int64_t)p->rotation[token] * dim, *s = sin + (int64_t)p->rotation[token] * dim;
    float *x = mixed + (int64_t)token * (p->heads + 2 * p->kv_heads) * dim, *key = x + p->heads * dim;
    for (int h = 0; h < p->heads; h++) {
        turn(x + h * dim, q_norm, p->eps, c, s, dim);
        for (int i = 0; i < dim; i++) x[h * dim + i] *= p->scale;
    }
    for (int h = 0; h < p->kv_heads; h++, key += dim) {
        int64_t at = (((int64_t)p->slot[row] * p->kv_heads + h) * length + p->place[token]) * dim;
        float *k = keys[p->shelf[row]] + at, *v = values[p->shelf[row]] + at;
        const float *value = key + p->kv_heads * dim;
        turn(key, k_norm, p->eps, c, s, dim);
        for (int i = 0; i < dim; i++) k[i] = key[i];
        for (int i = 0; i < dim; i++) v[i] = value[i];
    }
}

static void look(const Plan *p, int token, int head, const float *mixed, float *const *keys, float *const *values,
                 float *scores, float *out) {
    int dim = p->dim, row = p->row[token], groups = p->heads / p->kv_heads;
    int first = p->window > 0 && p->position[token] + 1 > p->window ? p->position[token] + 1 - p->window : 0;
    Stretch stretch[2] = {{0, 0, 0}, {0, 0, 0}};
    int begun = p->base_length[row];
    if (begun > first) {
        int64_t at = (((int64_t)p->base_slot[row] * p->kv_heads + head) * p->length[p->base[row]] + first) * dim;
        stretch[0] = (Stretch){keys[p->base[row]] + at, values[p->base[row]] + at, begun - first};
    }
    int from = first > begun ? first - begun : 0, shelf = p->shelf[row];
    int64_t at = (((int64_t)p->slot[row] * p->kv_heads + head) * p->length[shelf] + from) * dim;
    stretch[1] = (Stretch){keys[shelf] + at, values[shelf] + at, p->place[token] + 1 - from};
    const float *q = mixed + ((int64_t)token * (p->heads + 2 * p->kv_heads) + (int64_t)head * groups) * dim;
    out += ((int64_t)token * p->heads + (int64_t)head * groups) * dim;
    int most = dim > 64 ? 2 : 4;
    for (int g = 0; g < groups; g += most)
        attend_some(q + g * dim, stretch, dim, groups - g < most ? groups - g : most, scores, out + g * dim);
}

/* mixed [tokens, heads + 2 kv_heads, dim]: queries, keys, values; changed in place. out [tokens, heads, dim].
 * cos and sin [any, dim]: token t takes row rotation[t]. keys and values: one pointer for each shelf.
 * Returns 0, or 1 where there was no memory. */
int agentrl_layer(const Plan *p, float *mixed, const float *cos, const float *sin, const float *q_norm,
                  const float *k_norm, float *const *keys, float *const *values, float *out) {
    int failed = 0;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    {
        float *scores = room(sizeof(float) * 4 * (size_t)p->longest);
#pragma omp for
        for (int token = 0; token < p->tokens; token++)
            store(p, token, mixed, cos, sin, q_norm, k_norm, keys, values);
        if (!scores) failed = 1;
#pragma omp for schedule(dynamic, 4)
        for (int n = 0; n < p->tokens * p->kv_heads; n++)
            if (scores) look(p, n / p->kv_heads, n % p->kv_heads, mixed, keys, values, scores, out);
        free(scores);
    }
    return failed;
}

#define STRETCH 64

typedef struct {
    int32_t rows, vocabulary, top, threads;
    const float *logits, *heats; /* [rows, vocabulary]; [rows] temperatures */
    const double *numbers;       /* [rows] uniform in [0, 1): one decides one token */
    int32_t *ids, *top_ids;      /* [rows]; [rows, top] the likeliest, best first */
    float *best, *chosen, *top_values; /* [rows] largest logit, the drawn token's; [rows, top]; all over the temperature */
    double *total, *mean;        /* [rows] sums of p and of p (z - best), p = exp(z - best) */
} Draw;

/* Puts what is above the last of the `top` likeliest so far in its place among them. */
static void rank(const float *z, int first, int count, int top, int32_t *ids, float *values, int *held) {
    for (int i = 0; i < count; i++) {
        if (*held == top && !(z[i] > values[top - 1])) continue;
        int at = *held < top ? (*held)++ : top - 1;
        for (; at > 0 && z[i] > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = z[i], ids[at] = first + i;
    }
}

/* The token whose cumulative probability first exceeds the target; sums of stretches first. */
static int invert(const float *p, const double *sums, int vocabulary, double target) {
    double before = 0.0;
    int s = 0, last = (vocabulary - 1) / STRETCH;
    for (; s < last && !(before + sums[s] > target); s++) before += sums[s];
    for (int i = s * STRETCH; i < vocabulary && i < (s + 1) * STRETCH; i++) {
        before += p[i];
        if (before > target) return i;
    }
    int i = s < last ? (s + 1) * STRETCH - 1 : vocabulary - 1; /* rounding: the last likely token */
    while (i > 0 && !(p[i] > 0.0f)) i--;
    return i;
}

static void draw_row(const Draw *d, int row, float *z, double *sums) {
    int n = d->vocabulary, held = 0;
    const float *logits = d->logits + (int64_t)row * n;
    for (int i = 0; i < n; i++) z[i] = logits[i] / d->heats[row];
    float best = highest(z, n);
    double total = 0.0, mean = 0.0;
    for (int s = 0, first = 0; first < n; s++, first += STRETCH) {
        int count = n - first < STRETCH ? n - first : STRETCH;
        float sum = 0.0f, product = 0.0f, *x = z + first;
        if (held < d->top || highest(x, count) > d->top_values[row * d->top + d->top - 1])
            rank(x, first, count, d->top, d->top_ids + row * d->top, d->top_values + row * d->top, &held);
        for (int i = 0; i < count; i++) {
            float below = x[i] - best, p = exponential(below);
            p = below < -87.0f ? 0.0f : p;
            below = below < -1e4f ? -1e4f : below; /* minus infinity counts nothing */
            x[i] = p;
            sum += p;
            product += p * below;
        }
        total += sums[s] = sum;
        mean += product;
    }
    int id = invert(z, sums, n, d->numbers[row] * total);
    d->ids[row] = id, d->best[row] = best, d->chosen[row] = logits[id] / d->heats[row];
    d->total[row] = total, d->mean[row] = mean;
}

/* Returns 0, or 1 where there was no memory. */
int agentrl_draw(const Draw *d) {
    int failed = 0;
#pragma omp parallel num_threads(d->threads) if (d->threads > 1)
    {
        float *z = room(sizeof(float) * (size_t)d->vocabulary);
        double *sums = room(sizeof(double) * ((size_t)d->vocabulary / STRETCH + 1));
        if (!z || !sums) failed = 1;
#pragma omp for
        for (int row = 0; row < d->rows; row++)
            if (z && sums) draw_row(d, row, z, sums);
        free(z);
        free(sums);
    }
    return failed;
}

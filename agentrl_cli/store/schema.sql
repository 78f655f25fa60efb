-- The tables of a new store, as the migrations of schema.py make them; tests/store/test_file.py compares the two.
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE TABLE steps (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, step INTEGER NOT NULL, at REAL NOT NULL,
    metrics TEXT NOT NULL, PRIMARY KEY (run_id, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE tasks (
    pack TEXT NOT NULL, id TEXT NOT NULL, family TEXT NOT NULL, split TEXT NOT NULL, prompt TEXT NOT NULL,
    data TEXT NOT NULL, tools TEXT, PRIMARY KEY (pack, id)
) STRICT;
CREATE TABLE turns (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, role TEXT NOT NULL,
    token_start INTEGER NOT NULL, token_end INTEGER NOT NULL, stop_reason TEXT, weights_version TEXT NOT NULL,
    started REAL NOT NULL, seconds REAL NOT NULL, messages TEXT NOT NULL, reward REAL, diverged INTEGER NOT NULL DEFAULT 0, parent INTEGER, images TEXT, player TEXT NOT NULL DEFAULT '', PRIMARY KEY (episode_id, idx)
) STRICT;
CREATE TABLE tool_calls (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, turn INTEGER NOT NULL, idx INTEGER NOT NULL,
    name TEXT NOT NULL DEFAULT '', call_id TEXT, arguments TEXT, raw TEXT, call_error TEXT,
    result_turn INTEGER, result_idx INTEGER, result TEXT, result_error TEXT, reward REAL, metrics TEXT, seconds REAL,
    level TEXT, truncated INTEGER, done INTEGER, images TEXT, result_value TEXT, PRIMARY KEY (episode_id, turn, idx)
) STRICT;
CREATE INDEX tool_calls_name ON tool_calls (name, episode_id);
CREATE TABLE reward_parts (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, name TEXT NOT NULL,
    value REAL, weight REAL, is_primary INTEGER NOT NULL, detail TEXT NOT NULL, fakeable INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (episode_id, idx)
) STRICT;
CREATE TABLE turn_tokens (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, n INTEGER NOT NULL,
    ids BLOB NOT NULL, origin BLOB NOT NULL, logp_sampled BLOB, logp_policy BLOB, entropy BLOB,
    top_ids BLOB, top_logps BLOB, advantage BLOB, logp_train BLOB, ratio BLOB, clipped BLOB, weight BLOB,
    logp_ref BLOB, value BLOB, returns BLOB, logp_teacher BLOB, reward_advantage BLOB, support BLOB, PRIMARY KEY (episode_id, idx)
) STRICT;
CREATE TABLE live (
    episode_id TEXT PRIMARY KEY REFERENCES episodes(id) ON DELETE CASCADE,
    run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, state TEXT NOT NULL, turn INTEGER NOT NULL,
    text TEXT NOT NULL, started REAL NOT NULL, updated REAL NOT NULL
) STRICT;
CREATE INDEX live_run ON live (run_id);
CREATE TABLE evals (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, step INTEGER,
    name TEXT NOT NULL, split TEXT NOT NULL, n_tasks INTEGER NOT NULL, n_samples INTEGER NOT NULL,
    pass_rate REAL, low REAL, high REAL, metrics TEXT NOT NULL, at REAL NOT NULL
) STRICT;
CREATE INDEX evals_run ON evals (run_id, step);
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    step INTEGER NOT NULL, kind TEXT NOT NULL, path TEXT NOT NULL, metrics TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (run_id, kind, path)
) STRICT;
CREATE TABLE logs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, at REAL NOT NULL,
    level TEXT NOT NULL, text TEXT NOT NULL
) STRICT;
CREATE INDEX logs_run ON logs (run_id, id);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, at REAL NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE INDEX events_run ON events (run_id, id);
CREATE TABLE alerts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, at REAL NOT NULL,
    level TEXT NOT NULL, name TEXT NOT NULL, value REAL, threshold REAL, text TEXT NOT NULL
, step INTEGER) STRICT;
CREATE INDEX alerts_run ON alerts (run_id, id);
CREATE TABLE controls (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, at REAL NOT NULL,
    action TEXT NOT NULL, data TEXT NOT NULL, taken REAL
) STRICT;
CREATE INDEX controls_open ON controls (run_id) WHERE taken IS NULL;
CREATE INDEX controls_run ON controls (run_id, id);
CREATE TABLE drift (
    id INTEGER PRIMARY KEY AUTOINCREMENT, episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE,
    kind TEXT NOT NULL, turn INTEGER NOT NULL, position INTEGER NOT NULL, expected TEXT NOT NULL, got TEXT NOT NULL
) STRICT;
CREATE INDEX drift_episode ON drift (episode_id);
CREATE TABLE tokenizers (
    hash TEXT PRIMARY KEY, tokenizer_json BLOB NOT NULL, chat_template TEXT NOT NULL, specials TEXT NOT NULL
) STRICT;
CREATE TABLE attachments (hash TEXT PRIMARY KEY, media_type TEXT NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE tags (
    tag TEXT NOT NULL, episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, at REAL NOT NULL,
    PRIMARY KEY (tag, episode_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX tags_episode ON tags (episode_id);
CREATE TABLE notes (
    episode_id TEXT PRIMARY KEY REFERENCES episodes(id) ON DELETE CASCADE, text TEXT NOT NULL, at REAL NOT NULL
) STRICT;
CREATE TABLE score_sets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, name TEXT NOT NULL,
    at REAL NOT NULL, spec TEXT NOT NULL, UNIQUE (run_id, name)
) STRICT;
CREATE TABLE scores (
    set_id INTEGER NOT NULL REFERENCES score_sets(id) ON DELETE CASCADE,
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, reward REAL NOT NULL, delta REAL NOT NULL,
    advantage REAL, fact TEXT NOT NULL, parts TEXT NOT NULL, turns TEXT NOT NULL, PRIMARY KEY (episode_id, set_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE workers (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, number INTEGER NOT NULL, kind TEXT NOT NULL,
    node TEXT NOT NULL, pid INTEGER NOT NULL, state TEXT NOT NULL, version TEXT NOT NULL, running INTEGER NOT NULL,
    finished INTEGER NOT NULL, tokens INTEGER NOT NULL, rate REAL NOT NULL, lost INTEGER NOT NULL, error TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE "runs" (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, status TEXT NOT NULL,
    model TEXT NOT NULL, pack TEXT NOT NULL, seed INTEGER NOT NULL, step INTEGER NOT NULL, total_steps INTEGER NOT NULL,
    tokenizer TEXT REFERENCES tokenizers(hash), parent_id TEXT REFERENCES runs(id) ON DELETE SET NULL, parent_step INTEGER, dir TEXT NOT NULL, pid INTEGER NOT NULL,
    host TEXT NOT NULL, version TEXT NOT NULL, error TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL,
    heartbeat REAL NOT NULL, config TEXT NOT NULL
, claim TEXT NOT NULL DEFAULT '', pid_started TEXT NOT NULL DEFAULT '', boot TEXT NOT NULL DEFAULT '') STRICT;
CREATE TABLE "groups" (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE,
    task_id TEXT NOT NULL, step INTEGER, at REAL NOT NULL
, why TEXT NOT NULL DEFAULT '', pack TEXT, FOREIGN KEY (pack, task_id) REFERENCES tasks(pack, id)) STRICT;
CREATE INDEX groups_run ON groups (run_id, step);
CREATE TABLE "episodes" (
    rowid INTEGER PRIMARY KEY, started REAL NOT NULL, reward REAL, advantage REAL, primary_score REAL, step INTEGER,
    outcome TEXT, n_turns INTEGER NOT NULL, n_tokens INTEGER NOT NULL, n_model_tokens INTEGER NOT NULL,
    n_calls INTEGER NOT NULL, n_tool_errors INTEGER NOT NULL, sample INTEGER NOT NULL, seed INTEGER NOT NULL,
    kind TEXT NOT NULL, fact TEXT NOT NULL, flags TEXT NOT NULL, pack TEXT NOT NULL, family TEXT NOT NULL,
    split TEXT NOT NULL, level TEXT NOT NULL, task_id TEXT NOT NULL,
    run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, id TEXT NOT NULL UNIQUE, group_id TEXT,
    parent_id TEXT REFERENCES episodes(id) ON DELETE SET NULL, parent_turn INTEGER, weights_version TEXT NOT NULL, tokenizer TEXT REFERENCES tokenizers(hash), ended REAL NOT NULL,
    key TEXT, error TEXT NOT NULL
, FOREIGN KEY (group_id, run_id) REFERENCES groups(id, run_id), FOREIGN KEY (pack, task_id) REFERENCES tasks(pack, id)) STRICT;
CREATE INDEX episodes_started ON episodes (started);
CREATE INDEX episodes_run ON episodes (run_id, step);
CREATE INDEX episodes_group ON episodes (group_id);
CREATE INDEX episodes_task ON episodes (task_id, step);
CREATE INDEX episodes_key ON episodes (key) WHERE key IS NOT NULL;
CREATE INDEX episodes_parent ON episodes (parent_id) WHERE parent_id IS NOT NULL;
CREATE UNIQUE INDEX groups_id ON groups (id, run_id);
CREATE UNIQUE INDEX groups_alone ON groups (id) WHERE run_id IS NULL
;
CREATE VIEW v_episodes AS
    SELECT e.id, r.name AS run, e.kind, e.step, e.task_id AS task, e.sample, e.outcome, e.reward, e.primary_score,
        e.advantage, e.fact, e.n_turns, e.n_tokens, e.n_model_tokens, e.n_calls, e.n_tool_errors, e.flags,
        datetime(e.started, 'unixepoch') AS started, CASE WHEN e.ended > 0 THEN e.ended - e.started END AS seconds
    FROM episodes e LEFT JOIN runs r ON r.id = e.run_id;
CREATE VIEW v_groups AS
    SELECT e.group_id AS id, r.name AS run, e.step, e.task_id AS task, count(*) AS episodes,
        count(e.reward) AS graded, avg(e.reward) AS mean,
        sqrt(max(avg(e.reward * e.reward) - avg(e.reward) * avg(e.reward), 0)) AS sd,
        avg(CASE WHEN e.reward IS NOT NULL THEN e.outcome = 'solved' END) AS solved,
        max(e.reward) - min(e.reward) > 0 AS has_signal
    FROM episodes e LEFT JOIN runs r ON r.id = e.run_id
    WHERE e.group_id IS NOT NULL GROUP BY e.run_id, e.group_id;
CREATE VIEW v_turns AS
    SELECT t.episode_id AS episode, t.idx AS turn, coalesce(t.parent, t.idx - 1) AS parent, t.role,
        t.token_end - t.token_start AS tokens, t.stop_reason, t.seconds, c.name AS tool, c.arguments,
        coalesce(c.call_error, c.result_error) AS error, c.result, t.messages
    FROM turns t LEFT JOIN tool_calls c ON c.episode_id = t.episode_id AND c.turn = t.idx
    ORDER BY t.episode_id, t.idx, c.idx;

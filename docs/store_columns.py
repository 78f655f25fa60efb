"""Describes every table and column of a store; make_store.py writes store.md from it."""

from __future__ import annotations

_RUN = "run_id: the run; NULL outside runs"
_EPISODE = "episode_id: the episode"
_ID = "id: rising number"
_AT = "at: time"

TABLES: dict[str, str] = {
    "runs": """One training, rollout, evaluation, chat or what-if.
        id: sortable by time
        name: unique, chosen or made
        kind: `train`, `rollout`, `eval`, `chat`, `whatif`, `serve`
        status: `running`, `finished`, `stopped`, `failed`; a killed run stays `running`
        model: folder or name of the model, relative to the project if inside it
        pack: the packs' names
        seed: seed of the run
        step: finished steps
        total_steps: steps that are planned
        tokenizer: hash of the tokenizer that decodes its episodes → `tokenizers`; NULL for none
        parent_id: the run it was forked from → `runs`; NULL once that is deleted
        parent_step: the step it was forked at
        dir: its folder, relative to the store; empty if it has none
        pid: process that holds the run, or held it last
        host: machine of that process
        version: agentrl version that wrote the run
        error: message of the error that ended it
        started: time
        ended: time; 0 while it runs
        heartbeat: time of the holder's last heartbeat
        config: all settings, JSON
        claim: command of the process that holds the run now; empty if none does
        pid_started: start time of that process as its system reports it
        boot: boot id and process namespace of that process""",
    "steps": f"""Metrics of each step of a run.
        run_id: the run
        step: from 1
        {_AT}
        metrics: name → number, JSON; NaN is null, infinity 9e999""",
    "tasks": """Tasks that episodes refer to, also those of which only the name is known.
        pack: name of the pack
        id: unique within the pack
        family: kind of task within the pack
        split: `train`, `test` or `heldout`
        prompt: messages, JSON
        data: the row's other fields, JSON; null if only the name is known
        tools: names of its tools, JSON; NULL for all tools of the pack""",
    "groups": """Episodes of one task in one step; advantages are relative to their group.
        n: rising number
        id: unique within its run
        run_id: the run; NULL outside runs
        task_id: the task
        step: the step; NULL outside steps
        at: time
        why: what picked the task, if not its turn in the order
        pack: with task_id → `tasks`; NULL in groups of unknown packs""",
    "episodes": """One attempt at a task.
        rowid: rising number, which lists use
        started: time
        reward: sum of value × weight of its `reward_parts`; NULL if not graded
        advantage: mean over its trained tokens; NULL outside training
        primary_score: value of the primary reward part
        step: the step; NULL outside steps
        outcome: how it ended, see Words; NULL while it runs
        n_turns: turns
        n_tokens: tokens of all origins
        n_model_tokens: sampled tokens
        n_calls: tool calls
        n_tool_errors: failed tool calls, malformed ones included
        sample: number within its group
        seed: seed of its sampling
        kind: `train`, `rollout`, `eval`, `chat`, `whatif`, `serve`, or the ReMax baseline's
        fact: what training did with it: `trained`, `skipped:…`, or empty
        flags: names of flags, JSON; empty without any
        pack: name of the pack
        family: family of the task
        split: split of the task
        level: isolation levels of the sandboxes that ran its tools
        task_id: the task; with pack → `tasks`
        run_id: the run; NULL outside runs
        id: sortable by time
        group_id: the group; with run_id → `groups`; NULL outside groups
        parent_id: the episode that it continues → `episodes`; NULL once that is deleted
        parent_turn: the turn of that episode that it continues from
        weights_version: weights that sampled it
        tokenizer: hash of its tokenizer → `tokenizers`; NULL for none
        ended: time; 0 while it runs
        key: `run/step/group/sample`, the same after a resume; NULL outside steps
        error: message of the error that ended it""",
    "turns": f"""One message of an episode with its span of tokens. Where an agent changed its history, turns branch.
        {_EPISODE}
        idx: from 0
        role: `system`, `user`, `assistant`, `tool`
        token_start: first token of the turn
        token_end: token after the last
        stop_reason: `stop`, `stop_string`, `length`, `cancelled`; NULL for turns that were not sampled
        weights_version: weights that sampled it
        started: time
        seconds: duration of sampling or of the tools
        messages: chat messages, JSON
        reward: reward of the environment for this turn
        diverged: 1 if a user or environment answered otherwise in a rerun
        parent: the turn that it continues; NULL for the turn before it, −1 for a turn that begins another context
        images: hashes of the images of its messages but its results', JSON, see `attachments`
        player: the player whose conversation it belongs to, in a game; of an import a sub-agent; else empty""",
    "tool_calls": f"""A tool call and its result.
        {_EPISODE}
        turn: assistant turn of the call
        idx: number of the call within the turn
        name: the tool; empty if the call was not readable
        call_id: id of the call; NULL for a result without a call
        arguments: JSON; NULL if not readable
        raw: the call as the model wrote it
        call_error: class of error of a malformed call
        result_turn: turn that holds the result; NULL without one
        result_idx: number of the result within that turn
        result: text of the observation
        result_error: class of failure
        reward: reward of the tool for this call
        metrics: numbers that the tool reported, JSON
        seconds: duration
        level: isolation level of the sandbox that ran it
        truncated: 1 if the observation was cut to its limit
        done: 1 if the tool ended the episode
        images: hashes of images, JSON, see `attachments`
        result_value: the list that the tool returned, JSON; NULL for any other value""",
    "reward_parts": f"""The named parts of an episode's reward.
        {_EPISODE}
        idx: from 0
        name: of the reward function
        value: its result; NULL if not graded
        weight: factor in the reward
        is_primary: 1 for the part that decides `solved`
        detail: text for people
        fakeable: 1 if tests ran in the process of the solution""",
    "turn_tokens": f"""Little-endian arrays over a turn's tokens; float32, or float16 once pruned. NULL: no numbers.
        {_EPISODE}
        idx: the turn
        n: tokens
        ids: int32 token ids
        origin: int8: 0 template, 1 system, 2 user, 3 tool, 4 model, 5 forced
        logp_sampled: log-probability under the distribution that was sampled from
        logp_policy: log-probability under the policy at temperature 1
        entropy: entropy of the policy, nats
        top_ids: int32 [n, 5], the most likely alternatives; −1 if absent
        top_logps: [n, 5], their log-probabilities
        advantage: advantage in training; an empty BLOB is all NaN, NULL was never trained
        logp_train: log-probability before the first optimizer step
        ratio: new policy over old
        clipped: int8: 1 if the ratio was clipped, 2 if the token was rejected, 3 masked as certain, 4 as off-policy
        weight: effective gradient weight, −∂L/∂log p of the policy term
        logp_ref: log-probability under the reference model
        value: the critic's value
        returns: the critic's target
        logp_teacher: log-probability under the teacher
        reward_advantage: the reward's advantage, beside the teacher's
        support: int32: for each token the size of the set that it was drawn from, −1 for all; then the sets' ids""",
    "prompts": """Candidates of `agentrl optimize`, added by its first run; the episodes of one are tagged `prompt:ID`.
        n: number
        run_id: the optimisation
        id: hash of the texts
        parent_id: the candidate that it was made from; with run_id → `prompts`; NULL of the first
        origin: `seed`, `gepa` or `apo`
        parts: JSON, name of a text to the text
        scores: JSON, mean primary score on `validation` and `test`; with `_episodes`, what was spent by then
        at: time""",
    "live": f"""State of the episodes that run now.
        {_EPISODE}
        run_id: the run; NULL outside runs
        state: `pending`, `generating`, `processing_tools`, `interacting`, `terminated`
        turn: the current turn
        text: tail of the generated text
        started: time
        updated: time of the last change""",
    "workers": f"""Workers that make a run's episodes, as they were when last seen.
        run_id: the run
        number: of the worker, from 0
        kind: `processes` or `ray`
        node: name of its machine
        pid: its process there
        state: `ready`, `starting` or `closed`
        version: of the weights that it samples with
        running: episodes that it makes now
        finished: episodes that it has made
        tokens: tokens that it has sampled
        rate: tokens a second, lately
        lost: how often it died, hung or could not be reached, and was replaced
        error: why, the last time
        {_AT}""",
    "evals": f"""Results of evaluations.
        {_ID}
        {_RUN}
        step: the step; NULL outside training
        name: what was evaluated: `base`, `step-20`, `best`
        split: of the tasks
        n_tasks: tasks with a graded attempt
        n_samples: attempts per task
        pass_rate: pass@1
        low: lower end of its 95 % interval
        high: upper end
        metrics: all other numbers, JSON
        {_AT}""",
    "checkpoints": f"""Checkpoint folders.
        {_ID}
        run_id: the run
        step: the step
        kind: `step`, `best`, `last`
        path: relative to the store
        metrics: metrics of the step, JSON
        {_AT}""",
    "logs": f"""Lines of a run's log.
        {_ID}
        {_RUN}
        {_AT}
        level: severity
        text: the line""",
    "events": f"""What happened once, drawn as marks on curves.
        {_ID}
        {_RUN}
        {_AT}
        kind: for example `checkpoint`, `resumed`, `control:stop`
        data: fields of the kind, JSON""",
    "alerts": f"""Alerts of the health rules.
        {_ID}
        {_RUN}
        {_AT}
        level: `info`, `warn`, `bad`
        name: the rule
        value: the number it looked at
        threshold: its limit
        text: what to try
        step: the step; stored once per rule and step""",
    "controls": f"""What people ask of a running training.
        {_ID}
        run_id: the run
        {_AT}
        action: `pause`, `resume`, `checkpoint`, `evaluate`, `set`, `stop`
        data: fields of the action, JSON
        taken: time at which the training took it; NULL if waiting""",
    "drift": f"""Places where a rendering of the conversation differs from the ids.
        {_ID}
        {_EPISODE}
        kind: `resegmented`, `reserialised`, `by_design`, `structural`
        turn: the turn
        position: the token
        expected: text of the ids there
        got: text of the rendering""",
    "tokenizers": """Tokenizers, so that episodes are decoded without a model.
        hash: of the content
        tokenizer_json: zlib-compressed tokenizer.json; empty while only its hash is known
        chat_template: Jinja source
        specials: special tokens, JSON""",
    "lightning": """Records of the plugin lightning, added by its first use: its queue, and what attempts left behind.
        kind: `rollouts`, `attempts`, `spans`, `resources`, `workers`, `counter`
        id: of the record
        rollout_id: the rollout that an attempt or span belongs to; empty for others
        status: of a rollout, attempt or worker
        n: order of records of one kind that have the same status; of a counter, its number
        data: the record, JSON""",
    "attachments": """Images, each stored once.
        hash: SHA-256
        media_type: for example `image/png`
        data: bytes of the file""",
    "tags": f"""Tags that people give.
        tag: the word
        {_EPISODE}
        {_AT}""",
    "notes": f"""Notes that people write, one per episode.
        {_EPISODE}
        text: the note
        {_AT}""",
    "score_sets": f"""Rescorings of a run's episodes.
        {_ID}
        {_RUN}
        name: unique within the run
        {_AT}
        spec: what was changed: weights, functions, estimator; JSON""",
    "scores": f"""Reward and advantage that an episode would have had.
        set_id: the score set
        {_EPISODE}
        reward: new reward
        delta: new reward − stored reward
        advantage: new mean advantage; NULL if not trained
        fact: what training would have done with it
        parts: name → [value, weight], JSON
        turns: mean advantage of each assistant turn, JSON""",
    "v_episodes": """View: episodes for people.
        id: of the episode
        run: name of the run
        kind: as in `episodes`
        step: as in `episodes`
        task: id of the task
        sample: as in `episodes`
        outcome: as in `episodes`
        reward: as in `episodes`
        primary_score: as in `episodes`
        advantage: as in `episodes`
        fact: as in `episodes`
        n_turns: as in `episodes`
        n_tokens: as in `episodes`
        n_model_tokens: as in `episodes`
        n_calls: as in `episodes`
        n_tool_errors: as in `episodes`
        flags: as in `episodes`
        started: UTC, as text
        seconds: duration; NULL while it runs""",
    "v_turns": """View: turns with their tool calls, one row per call.
        episode: id of the episode
        turn: index of the turn
        parent: the turn that it continues; −1 for none
        role: as in `turns`
        tokens: tokens of the turn
        stop_reason: as in `turns`
        seconds: as in `turns`
        tool: name of the tool
        arguments: as in `tool_calls`
        error: error of the call or of its result
        result: as in `tool_calls`
        messages: as in `turns`""",
    "v_groups": """View: groups with the mean and spread of their rewards.
        id: of the group
        run: name of the run
        step: of the group
        task: id of the task
        episodes: episodes in the group
        graded: episodes with a reward
        mean: mean reward
        sd: standard deviation of the rewards
        solved: share of graded episodes that are solved
        has_signal: 1 if the rewards differ""",
}
"""Table or view → what it holds, then `column: description` lines."""


def described() -> dict[str, tuple[str, dict[str, str]]]:
    """Table or view → (what it holds, column → description)."""
    out = {}
    for table, text in TABLES.items():
        first, *lines = (line.strip() for line in text.splitlines())
        out[table] = (
            first,
            dict((name, rest) for name, _, rest in (line.partition(": ") for line in lines)),
        )
    return out

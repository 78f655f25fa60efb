"""The tables of `runs/agentrl.db`, as migrations by name.

A migration is never edited after a release: a change is a new entry at the end of `MIGRATIONS`. A new file gets its
tables at once from `schema.sql`, which has to say the same as all migrations together (a test compares). The names
that were applied are kept in `_sqlite_migrations`, so `sqlite-utils migrate --list` reads them too, and `PRAGMA
user_version` holds their number, so that an older agentrl refuses a newer file.

Conventions: STRICT tables, TEXT ids, seconds since the epoch as REAL, JSON in TEXT, arrays per token in BLOBs
(little-endian; see codec.py). Bulk is in `turn_tokens`, away from the rows that lists scan; in `episodes` the
columns that filters read come first. docs/store_columns.py describes every column.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from agentrl_cli.store.foreign_keys import add_foreign_keys
from agentrl_cli.store.places import make_relative

APPLICATION_ID = 0x41524C31
"""`ARL1`: distinguishes an agentrl store from other SQLite files, for file(1) too."""

MIGRATION_SET = "agentrl"

_INITIAL = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, status TEXT NOT NULL,
    model TEXT NOT NULL, pack TEXT NOT NULL, seed INTEGER NOT NULL, step INTEGER NOT NULL, total_steps INTEGER NOT NULL,
    tokenizer TEXT NOT NULL, parent_id TEXT, parent_step INTEGER, dir TEXT NOT NULL, pid INTEGER NOT NULL,
    host TEXT NOT NULL, version TEXT NOT NULL, error TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL,
    heartbeat REAL NOT NULL, config TEXT NOT NULL
) STRICT;
CREATE TABLE steps (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, step INTEGER NOT NULL, at REAL NOT NULL,
    metrics TEXT NOT NULL, PRIMARY KEY (run_id, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE tasks (
    pack TEXT NOT NULL, id TEXT NOT NULL, family TEXT NOT NULL, split TEXT NOT NULL, prompt TEXT NOT NULL,
    data TEXT NOT NULL, tools TEXT, PRIMARY KEY (pack, id)
) STRICT;
CREATE TABLE groups (
    n INTEGER PRIMARY KEY, id TEXT NOT NULL, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE,
    task_id TEXT NOT NULL, step INTEGER, at REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX groups_id ON groups (id, ifnull(run_id, ''));
CREATE INDEX groups_run ON groups (run_id, step);
CREATE TABLE episodes (
    rowid INTEGER PRIMARY KEY, started REAL NOT NULL, reward REAL, advantage REAL, primary_score REAL, step INTEGER,
    outcome TEXT, n_turns INTEGER NOT NULL, n_tokens INTEGER NOT NULL, n_model_tokens INTEGER NOT NULL,
    n_calls INTEGER NOT NULL, n_tool_errors INTEGER NOT NULL, sample INTEGER NOT NULL, seed INTEGER NOT NULL,
    kind TEXT NOT NULL, fact TEXT NOT NULL, flags TEXT NOT NULL, pack TEXT NOT NULL, family TEXT NOT NULL,
    split TEXT NOT NULL, level TEXT NOT NULL, task_id TEXT NOT NULL,
    run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, id TEXT NOT NULL UNIQUE, group_id TEXT,
    parent_id TEXT, parent_turn INTEGER, weights_version TEXT NOT NULL, tokenizer TEXT NOT NULL, ended REAL NOT NULL,
    key TEXT, error TEXT NOT NULL
) STRICT;
CREATE INDEX episodes_started ON episodes (started);
CREATE INDEX episodes_run ON episodes (run_id, step);
CREATE INDEX episodes_group ON episodes (group_id);
CREATE INDEX episodes_task ON episodes (task_id, step);
CREATE INDEX episodes_key ON episodes (key) WHERE key IS NOT NULL;
CREATE INDEX episodes_parent ON episodes (parent_id) WHERE parent_id IS NOT NULL;
CREATE TABLE turns (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, role TEXT NOT NULL,
    token_start INTEGER NOT NULL, token_end INTEGER NOT NULL, stop_reason TEXT, weights_version TEXT NOT NULL,
    started REAL NOT NULL, seconds REAL NOT NULL, messages TEXT NOT NULL, PRIMARY KEY (episode_id, idx)
) STRICT;
CREATE TABLE tool_calls (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, turn INTEGER NOT NULL, idx INTEGER NOT NULL,
    name TEXT NOT NULL DEFAULT '', call_id TEXT, arguments TEXT, raw TEXT, call_error TEXT,
    result_turn INTEGER, result_idx INTEGER, result TEXT, result_error TEXT, reward REAL, metrics TEXT, seconds REAL,
    level TEXT, truncated INTEGER, done INTEGER, images TEXT, PRIMARY KEY (episode_id, turn, idx)
) STRICT;
CREATE INDEX tool_calls_name ON tool_calls (name, episode_id);
CREATE TABLE reward_parts (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, name TEXT NOT NULL,
    value REAL, weight REAL, is_primary INTEGER NOT NULL, detail TEXT NOT NULL, PRIMARY KEY (episode_id, idx)
) STRICT;
CREATE TABLE turn_tokens (
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, idx INTEGER NOT NULL, n INTEGER NOT NULL,
    ids BLOB NOT NULL, origin BLOB NOT NULL, logp_sampled BLOB, logp_policy BLOB, entropy BLOB,
    top_ids BLOB, top_logps BLOB, advantage BLOB, logp_train BLOB, ratio BLOB, clipped BLOB, weight BLOB,
    logp_ref BLOB, value BLOB, returns BLOB, PRIMARY KEY (episode_id, idx)
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
) STRICT;
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
CREATE VIEW v_episodes AS
    SELECT e.id, r.name AS run, e.kind, e.step, e.task_id AS task, e.sample, e.outcome, e.reward, e.primary_score,
        e.advantage, e.fact, e.n_turns, e.n_tokens, e.n_model_tokens, e.n_calls, e.n_tool_errors, e.flags,
        datetime(e.started, 'unixepoch') AS started, CASE WHEN e.ended > 0 THEN e.ended - e.started END AS seconds
    FROM episodes e LEFT JOIN runs r ON r.id = e.run_id;
CREATE VIEW v_groups AS
    SELECT e.group_id AS id, r.name AS run, e.step, e.task_id AS task, count(*) AS episodes, avg(e.reward) AS mean,
        sqrt(max(avg(e.reward * e.reward) - avg(e.reward) * avg(e.reward), 0)) AS sd,
        avg(e.outcome = 'solved') AS solved, max(e.reward) - min(e.reward) > 0 AS has_signal
    FROM episodes e LEFT JOIN runs r ON r.id = e.run_id
    WHERE e.group_id IS NOT NULL GROUP BY e.run_id, e.group_id;
CREATE VIEW v_turns AS
    SELECT t.episode_id AS episode, t.idx AS turn, t.role, t.token_end - t.token_start AS tokens, t.stop_reason,
        t.seconds, c.name AS tool, c.arguments, coalesce(c.call_error, c.result_error) AS error, c.result, t.messages
    FROM turns t LEFT JOIN tool_calls c ON c.episode_id = t.episode_id AND c.turn = t.idx
    ORDER BY t.episode_id, t.idx, c.idx;
"""

Migration = tuple[str, str | Callable[[sqlite3.Connection], None]]

NOT_GRADED = (
    "(outcome IN ('env_error', 'timeout', 'sandbox_error', 'cancelled', 'drift', 'too_long')"
    " OR NOT EXISTS (SELECT 1 FROM reward_parts p WHERE p.episode_id=episodes.id))"
)
"""The episodes that were not graded before schema 10, where their reward is 0."""

FLAGS = """iif(
    flags LIKE '%"NOTOOL"%' AND EXISTS (
        SELECT 1 FROM tasks t WHERE t.pack=episodes.pack AND t.id=episodes.task_id AND t.tools='[]'
    ),
    (SELECT iif(count(*), json_group_array(value), '') FROM json_each(flags) WHERE value<>'NOTOOL'),
    flags
)"""
"""The flags before schema 21, without NOTOOL on tasks that offer no tool."""

MIGRATIONS: tuple[Migration, ...] = (
    ("m001_initial", _INITIAL),
    ("m002_group_why", "ALTER TABLE groups ADD COLUMN why TEXT NOT NULL DEFAULT '';\n"),
    (
        "m003_scores",
        """
CREATE TABLE score_sets (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT REFERENCES runs(id) ON DELETE CASCADE, name TEXT NOT NULL,
    at REAL NOT NULL, spec TEXT NOT NULL, UNIQUE (run_id, name)
) STRICT;
CREATE TABLE scores (
    set_id INTEGER NOT NULL REFERENCES score_sets(id) ON DELETE CASCADE,
    episode_id TEXT NOT NULL REFERENCES episodes(id) ON DELETE CASCADE, reward REAL NOT NULL, delta REAL NOT NULL,
    advantage REAL, fact TEXT NOT NULL, parts TEXT NOT NULL, turns TEXT NOT NULL, PRIMARY KEY (episode_id, set_id)
) STRICT, WITHOUT ROWID;
""",
    ),
    ("m004_alert_step", "ALTER TABLE alerts ADD COLUMN step INTEGER;\n"),
    ("m005_fakeable", "ALTER TABLE reward_parts ADD COLUMN fakeable INTEGER NOT NULL DEFAULT 0;\n"),
    ("m006_turn_reward", "ALTER TABLE turns ADD COLUMN reward REAL;\n"),
    ("m007_turn_diverged", "ALTER TABLE turns ADD COLUMN diverged INTEGER NOT NULL DEFAULT 0;\n"),
    (
        "m008_claim",
        """
ALTER TABLE runs ADD COLUMN claim TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN pid_started TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN boot TEXT NOT NULL DEFAULT '';
UPDATE runs SET claim = kind WHERE status = 'running';
""",
    ),
    ("m009_relative_paths", make_relative),
    (
        "m010_ungraded",
        f"""
UPDATE episodes SET reward=NULL WHERE reward IS NOT NULL AND {NOT_GRADED};
DELETE FROM scores WHERE episode_id IN (SELECT id FROM episodes WHERE reward IS NULL);
DROP VIEW v_groups;
CREATE VIEW v_groups AS
    SELECT e.group_id AS id, r.name AS run, e.step, e.task_id AS task, count(*) AS episodes,
        count(e.reward) AS graded, avg(e.reward) AS mean,
        sqrt(max(avg(e.reward * e.reward) - avg(e.reward) * avg(e.reward), 0)) AS sd,
        avg(CASE WHEN e.reward IS NOT NULL THEN e.outcome = 'solved' END) AS solved,
        max(e.reward) - min(e.reward) > 0 AS has_signal
    FROM episodes e LEFT JOIN runs r ON r.id = e.run_id
    WHERE e.group_id IS NOT NULL GROUP BY e.run_id, e.group_id;
""",
    ),
    (
        "m011_turn_parent",
        """
ALTER TABLE turns ADD COLUMN parent INTEGER;
DROP VIEW v_turns;
CREATE VIEW v_turns AS
    SELECT t.episode_id AS episode, t.idx AS turn, coalesce(t.parent, t.idx - 1) AS parent, t.role,
        t.token_end - t.token_start AS tokens, t.stop_reason, t.seconds, c.name AS tool, c.arguments,
        coalesce(c.call_error, c.result_error) AS error, c.result, t.messages
    FROM turns t LEFT JOIN tool_calls c ON c.episode_id = t.episode_id AND c.turn = t.idx
    ORDER BY t.episode_id, t.idx, c.idx;
""",
    ),
    ("m012_of_a_plugin", ""),
    (
        "m013_workers",
        """
CREATE TABLE workers (
    run_id TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, number INTEGER NOT NULL, kind TEXT NOT NULL,
    node TEXT NOT NULL, pid INTEGER NOT NULL, state TEXT NOT NULL, version TEXT NOT NULL, running INTEGER NOT NULL,
    finished INTEGER NOT NULL, tokens INTEGER NOT NULL, rate REAL NOT NULL, lost INTEGER NOT NULL, error TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;
""",
    ),
    ("m014_tool_value", "ALTER TABLE tool_calls ADD COLUMN result_value TEXT;\n"),
    (
        "m015_teacher",
        """
ALTER TABLE turn_tokens ADD COLUMN logp_teacher BLOB;
ALTER TABLE turn_tokens ADD COLUMN reward_advantage BLOB;
""",
    ),
    ("m016_of_a_plugin", ""),
    ("m017_support", "ALTER TABLE turn_tokens ADD COLUMN support BLOB;\n"),
    ("m018_turn_images", "ALTER TABLE turns ADD COLUMN images TEXT;\n"),
    ("m019_foreign_keys", add_foreign_keys),
    ("m020_turn_player", "ALTER TABLE turns ADD COLUMN player TEXT NOT NULL DEFAULT '';\n"),
    (
        "m021_no_tools_offered",
        f"""UPDATE episodes SET flags={FLAGS} WHERE flags LIKE '%"NOTOOL"%';\n""",
    ),
)
"""(name, statements separated by `;` at a line's end, or a function of the connection), oldest first.

Two are empty: they made tables that plugins bring now (`file.py`). A store that has these keeps them.
"""

SCHEMA_VERSION = len(MIGRATIONS)


def statements(script: str) -> list[str]:
    """Return the statements of a migration. A statement has no `;` at a line's end inside."""
    return [part.strip() for part in script.split(";\n") if part.strip()]

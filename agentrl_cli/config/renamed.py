"""Names that settings had in 0.1.0: each still works for one release, and the message names the new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.config.algo import CHOICES
from agentrl_cli.config.choice import option_names
from agentrl_cli.registry.plugins import offers

UNDER: Mapping[str, str] = {
    "algo.advantage": "gamma lam=lambda pass_k=k turn_coef advantage_eps=eps value_lr value_clip value_bootstrap"
    " value_coef",
    "algo.loss": "clip_low clip_high clip_dual sapo_positive=positive sapo_negative=negative cov_fraction=fraction"
    " cov_low=low cov_high=high cov_kl_coef=kl_coef",
    "algo.kl": "kl_coef=coef kl_in=where kl_unbiased=unbiased kl_target=target ref_ema ref_ema_steps",
    "algo.entropy": "entropy_coef=coef entropy_target=target entropy_step=step entropy_share=share",
    "algo.off_policy": "correction correction_cap=cap correction_floor=floor off_policy_mask=mask bypass reject"
    " reject_upper reject_lower",
    "algo.skip": "drop_zero_variance=zero_variance mask_overlong=overlong mask_void=void",
    "algo.length_penalty": "overlong_penalty=overlong overlong_buffer=buffer",
    "rollout.observation": "max_observation_tokens=tokens max_observation_chars=chars truncate_side=cut overflow",
    "rollout.timeout": "tool_timeout=tool episode_timeout=episode",
    "rollout.truncation": "top_p top_k min_p repetition_penalty bad_tokens replay_truncation=replay",
    "train.optimizer": "weight_decay betas",
    "train.schedule": "warmup_steps",
    "train.eval": "eval_every=every eval_split=split eval_tasks=tasks eval_samples=samples",
    "train.save": "save_every=every keep_last=keep",
    "train.stop_on": "stop_patience=patience",
    "sandbox.limits": "wall cpu memory_mb processes file_mb disk_mb inodes output_kb open_files",
    "remote.backend": "mode processed_logprobs sync_dir sleep",
    "remote.request": "timeout retries patience",
    "model.chat": "chat_template=template template_variables=variables append_only parser",
}
"""Key of a group → the keys of its section that moved under it, with their new name where it differs."""


RENAMED: Mapping[str, str] = {
    **{
        f"{group.partition('.')[0]}.{old}": f"{group}.{new or old}"
        for group, moves in UNDER.items()
        for old, _, new in (move.partition("=") for move in moves.split())
    },
    "drift.structural": "algo.skip.drift",
    "remote.urls": "remote.url",
    **offers("renamed"),
}
"""Old dotted key → the new one."""


def new_key(key: str, value: Any) -> tuple[str, Any]:
    """Return the key and the value by today's names; an unchanged key if it is not an old one.

    An empty key: the value was a default that said nothing.
    """
    if key == "algo.kl" and value in ("k1", "k2", "k3", "abs"):
        return "algo.kl.estimate", value
    section, _, rest = key.partition(".")
    leaf, dot, option = rest.partition(".")
    old = f"{section}.{leaf}"
    if old not in RENAMED:
        return key, value
    if (value is None and old in _UNSET) or (value == [] and old == "remote.urls"):
        return "", value
    return RENAMED[old] + dot + option, value == "skip" if old == "drift.structural" else value


_UNSET = frozenset(
    f"algo.{name}" for name in "clip_low clip_high cov_fraction cov_low cov_high".split()
)
"""Keys for which null meant the loss's own default."""


def is_foreign(key: str, name: str) -> bool:
    """Whether a dotted key is an option that the estimator or loss of this name does not have."""
    choice, _, option = key.rpartition(".")
    record = CHOICES[choice][0].get(name) if choice in CHOICES else None
    return record is not None and option not in option_names(record.options)


def by_todays_names(settings: Mapping[str, Any], mains: Mapping[str, str]) -> dict[str, Any]:
    """Return settings by section, as a run stored them, with old keys under their new ones.

    `mains`: key of each group to its main setting. Options that a choice does not have are dropped: they were once
    every choice's.
    """
    tree: dict[str, Any] = {
        name: dict(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }
    moved = []
    for section in [name for name, value in settings.items() if isinstance(value, Mapping)]:
        for leaf, value in settings[section].items():
            new, plain = new_key(f"{section}.{leaf}", value)
            if new != f"{section}.{leaf}":
                del tree[section][leaf]
                moved += [(new, plain)] if new else []
        if section == "drift" and not tree[section]:
            del tree[section]
    for key, value in moved:
        section, leaf, *option = key.split(".")
        inside = tree.setdefault(section, {})
        group = f"{section}.{leaf}"
        if option:
            given = inside.get(leaf, {})
            inside[leaf] = {**given} if isinstance(given, Mapping) else {mains[group]: given}
            name = str(inside[leaf].get("name", CHOICES[group][1])) if group in CHOICES else ""
            if not is_foreign(key, name):
                inside[leaf].setdefault(option[0], value)
        elif not inside.get(leaf):
            inside[leaf] = value
    return tree

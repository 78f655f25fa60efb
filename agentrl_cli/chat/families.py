"""Chat templates for base models, which have none: one for each family, by the tokens that its tokenizer has.

Turns begin and end as in the family's instruction-tuned models. Tools are written as in Hermes: a base model knows no
form of its own. https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from agentrl_cli.chat.tokenizer import BaseTokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """How the turns of a family look."""

    opened: str
    """Jinja: what a turn of `role` begins with."""
    closed: str
    """Jinja: what it ends with."""
    token: str
    """An added token that the family's tokenizers have; empty if any will do."""


FAMILIES = {
    "chatml": Family(r"'<|im_start|>' + role + '\n'", r"'<|im_end|>\n'", "<|im_start|>"),
    "llama3": Family(
        r"'<|start_header_id|>' + role + '<|end_header_id|>\n\n'",
        "'<|eot_id|>'",
        "<|start_header_id|>",
    ),
    "gemma": Family(
        r"'<start_of_turn>' + ('model' if role == 'assistant' else role) + '\n'",
        r"'<end_of_turn>\n'",
        "<start_of_turn>",
    ),
    "plain": Family(r"'### ' + role + ':\n'", r"(eos_token or '') + '\n'", ""),
}
"""The name that `model.chat.template` takes, to the template."""


def family_template(name: str) -> str:
    """Return the Jinja text of a family's template. Raises KeyError."""
    family = FAMILIES[name]
    body = (
        resources.files("agentrl_cli.chat")
        .joinpath("templates/base.jinja")
        .read_text(encoding="utf-8")
    )
    return (
        f"{{%- macro opened(role) %}}{{{{- {family.opened} }}}}{{%- endmacro %}}\n"
        f"{{%- macro closed() %}}{{{{- {family.closed} }}}}{{%- endmacro %}}\n{body}"
    )


def family_of(tokenizer: BaseTokenizer) -> str:
    """Return the family whose tokens a tokenizer has; `plain` if it has none of them."""
    return next(
        name
        for name, family in FAMILIES.items()
        if not family.token or tokenizer.id_of(family.token) is not None
    )

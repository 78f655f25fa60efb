"""The chat template of the bundled tiny models, with images or without."""

from __future__ import annotations

from importlib import resources

PARTS = """\
{{%- macro parts(content) %}}
    {{%- if content is string %}}{{{{- content }}}}{{%- else %}}
        {{%- for part in content %}}{{{{- '{image}' if part.type == 'image' else part.text }}}}{{%- endfor %}}
    {{%- endif %}}
{{%- endmacro %}}
"""
"""A macro of templates that show images."""
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def tiny_template(images: bool = False) -> str:
    """Return the chat template of the bundled tiny-agent model: Qwen style, short, append-only.

    `images`: it shows images, too.
    """
    text = (
        resources.files("agentrl_cli.chat")
        .joinpath("templates/tiny.jinja")
        .read_text(encoding="utf-8")
    )
    if not images:
        return text
    for before in ("<tool_response>\\n' + ", "message.role + '\\n' + "):
        text = text.replace(f"{before}message.content", f"{before}parts(message.content)")
    # What a template of the Qwen family writes for an image.
    return PARTS.format(image="<|vision_start|><|image_pad|><|vision_end|>") + text

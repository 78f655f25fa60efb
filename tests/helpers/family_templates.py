"""Chat templates written after the published form of their families, cut to what turns, calls and thinking do.

Where what a family ships differs in wording alone (system texts, how a schema is spelled), that is left out.
"""

# https://github.com/openai/harmony/blob/main/docs/format.md and the template of openai/gpt-oss-20b: the last answer
# ends with <|return|>, earlier ones with <|end|>; the analysis before a call stays until a final answer follows.
GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{% endif %}
{%- if tools %}{{- '# Tools\\n\\n## functions\\n\\n' + tools|tojson }}{% endif %}{{- '<|end|>' }}{% endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>analysis<|message|>' in message.content or '<|channel|>final<|message|>' in message.content %}
{{- raise_exception('channel tags in the content field') }}{% endif %}
{%- if 'tool_calls' in message %}
{%- set future = namespace(found=false) %}
{%- for later in loop_messages[loop.index:] %}
{%- if later.role == 'assistant' and 'tool_calls' not in later %}{% set future.found = true %}{% endif %}{% endfor %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{- raise_exception('both content and thinking') }}{% endif %}
{%- if (message.content or message.thinking) and not future.found %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments|tojson + '<|call|>' }}
{%- set last_tool_call.name = call.name %}
{%- elif loop.last and not add_generation_prompt %}
{%- if 'thinking' in message %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- set last_tool_call.name = none %}{% endif %}
{%- elif message.role == 'tool' %}
{%- if last_tool_call.name is none %}{{- raise_exception('no previous assistant message with a tool call') }}{% endif %}
{{- '<|start|>functions.' + last_tool_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content|tojson + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def gemma4(prompt_gives: str = "") -> str:
    """Google's Gemma 4: results within the model's turn, its text behind them; `prompt_gives` in the 31B's."""
    return (
        """\
{{- bos_token }}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if tools or messages[0].role == 'system' %}{{- '<|turn>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% endif %}
{%- if tools %}{{- '<|tool>' + tools|tojson + '<tool|>' }}{% endif %}{{- '<turn|>\\n' }}{% endif %}
{%- set ns = namespace(prev='', last_user=-1) %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in rest %}{% if m.role != 'tool' %}
{%- set ns.prev = '' %}{% set before = namespace(role='') %}
{%- for other in rest[:loop.index0] %}
{%- if other.role != 'tool' %}{% set before.role = other.role %}{% endif %}{% endfor %}
{%- if not (m.role == 'assistant' and before.role == 'assistant') %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}{% endif %}
{%- set thought = m.get('reasoning') or m.get('reasoning_content') %}
{%- if thought and loop.index0 > ns.last_user and m.get('tool_calls') %}
{{- '<|channel>thought\\n' + thought + '\\n<channel|>' }}{% endif %}
{%- set answered = namespace(flag=false, stop=false) %}
{%- if m.get('tool_calls') %}
{%- for call in m.tool_calls %}{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}{{- ',' if not loop.first }}
{{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value|tojson) }}{% endfor %}
{{- '}<tool_call|>' }}{% endfor %}{% set ns.prev = 'call' %}
{%- for other in rest[loop.index:] %}{% if other.role != 'tool' %}{% set answered.stop = true %}{% endif %}
{%- if not answered.stop %}
{{- '<|tool_response>response:' + other.name + '{value:<|"|>' + other.content + '<|"|>}<tool_response|>' }}
{%- set answered.flag = true %}{% set ns.prev = 'response' %}{% endif %}{% endfor %}{% endif %}
{%- set parts = namespace(said='') %}
{%- for part in m.content.split('<channel|>') %}
{%- set parts.said = parts.said + part.split('<|channel>')[0] %}{% endfor %}
{{- (parts.said if m.role == 'assistant' else m.content) | trim }}
{%- if ns.prev == 'call' and not answered.flag %}{{- '<|tool_response>' }}
{%- elif not (answered.flag and not parts.said | trim) %}{{- '<turn|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt and ns.prev not in ('response', 'call') %}{{- '<|turn>model\\nGIVEN' }}{% endif %}"""
    ).replace("GIVEN", prompt_gives)


def chatml(generation: str, history: str = "") -> str:
    """ChatML with Hermes's calls; `generation` is given after the header, `history` in turns of the history."""
    return """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + tools|tojson + '</tools><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\nHISTORY' + m.content.split('</think>')[-1].lstrip('\\n') }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nGIVEN' }}{% endif %}""".replace(
        "HISTORY", history
    ).replace("GIVEN", generation)


# What the generation prompt gives of thinking, and what the history keeps of that, in four
# families.
GIVEN = {
    "QwQ": chatml("<think>\\n</think>"),
    "DeepSeek-V3.2": chatml("<think></think>", "</think>"),
    "GLM-4.7-Flash": chatml("<think>", "</think>"),
    "Gemma-4-31B": gemma4("<|channel>thought\\n<channel|>"),
}


# The first template of LiquidAI/LFM2-1.2B: it lists tools and shows results, and knows nothing of calls.
LFM2 = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{%- set system = system + '\\nList of tools: <|tool_list_start|>' + tools|tojson + '<|tool_list_end|>' %}{% endif %}
{%- if system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\\n' }}
{{- '<|tool_response_start|>' + m.content + '<|tool_response_end|>' if m.role == 'tool' else m.content }}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# In its tokenizer, and not in its template.
LFM2_CALLS = ("<|tool_call_start|>", "<|tool_call_end|>")


# Cohere's Command R7B (Cohere2): a text has an end of its own, within the turn.
COHERE2 = """\
{{- bos_token }}
{%- for m in messages %}
{%- set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' }}
{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' if m.role == 'assistant' else m.content }}
{{- '<|END_OF_TURN_TOKEN|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"""


def mistral(system_stays: bool) -> str:
    """Mistral Small 3.2, and Nemo where `system_stays` is false: tools before the last user message.

    Nemo's system text stands in the last message alone.
    """
    system = "{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}"
    return (
        (
            """\
{{- bos_token }}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}SYSTEM{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{- '[AVAILABLE_TOOLS]' + tools|tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' }}LAST{{- m.content + '[/INST]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{%- for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments|tojson }}{% endfor %}
{{- eos_token }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
{%- else %}{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}{# </s> #}"""
        )
        .replace(*("SYSTEM", system) if system_stays else ("SYSTEM", ""))
        .replace(
            "LAST",
            ""
            if system_stays
            else "{% if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}",
        )
    )


# Gemma 4's way with text beside a call, in ChatML: it stands behind the results.
TEXT_MOVES = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + tools|tojson + '</tools><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{% set at = loop.index0 %}
{%- if m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant\\n' }}
{%- for c in m.tool_calls %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments|tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response>' }}
{{- messages[at - 1].content if messages[at - 1].tool_calls }}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

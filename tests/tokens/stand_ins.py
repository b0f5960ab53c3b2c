"""Small chat templates that write tool calls in the form of each known format.

They are written for these tests: the words around the calls are of no published model.
"""

from __future__ import annotations

from pathlib import Path

from tests.tokens.families import FAMILIES, write_family

_SKELETON = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>tool
{{ m.content }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}
{%- if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EACH = "{% for c in m.tool_calls %}"
_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_LIST = f"[{_EACH}{_JSON}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"
_VALUE = "{{ v if v is string else v | tojson }}"
_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_DSML = (
    f'<｜DSML｜invoke name="{{{{ c.function.name }}}}">{_ITEMS}<｜DSML｜parameter name="{{{{ k }}}}" '
    f"string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_VALUE}</｜DSML｜parameter>{{% endfor %}}</｜DSML｜invoke>"
)
_LINES = (
    f"<function={{{{ c.function.name }}}}>\n{_ITEMS}<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n"
    "{% endfor %}</function>"
)
_SEED = f"<function={{{{ c.function.name }}}}>{_ITEMS}<parameter={{{{ k }}}}>{_VALUE}</parameter>{{% endfor %}}</function>"
_PYTHON = (
    f"[{_EACH}{{{{ c.function.name }}}}({_ITEMS}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
)
CALLS = {
    "hermes": f"{_EACH}<tool_call>{_JSON}</tool_call>{{% endfor %}}",
    "qwen_coder": f"{_EACH}<tool_call>\n{_LINES}\n</tool_call>{{% endfor %}}",
    "seed_oss": f"{_EACH}<seed:tool_call>{_SEED}</seed:tool_call>{{% endfor %}}",
    "glm": (
        f"{_EACH}<tool_call>{{{{ c.function.name }}}}{_ITEMS}<arg_key>{{{{ k }}}}</arg_key><arg_value>{_VALUE}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}"
    ),
    "mistral": f"[TOOL_CALLS] {_LIST}",
    "mistral_v11": (
        f"{_EACH}[TOOL_CALLS]{{{{ c.function.name }}}}[ARGS]{{{{ c.function.arguments | tojson }}}}{{% endfor %}}"
    ),
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜>{_EACH}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ c.function.name }}}}\n```json\n"
        "{{ c.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜>{_EACH}<｜tool▁call▁begin｜>{{{{ c.function.name }}}}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": f"<｜DSML｜function_calls>{_EACH}{_DSML}{{% endfor %}}</｜DSML｜function_calls>",
    "kimi_k2": (
        f"<|tool_calls_section_begin|>{_EACH}<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "minimax_m1": f"<tool_calls>\n{_EACH}{_JSON}\n{{% endfor %}}</tool_calls>",
    "minimax_m2": (
        f'<minimax:tool_call>{_EACH}<invoke name="{{{{ c.function.name }}}}">{_ITEMS}<parameter name="{{{{ k }}}}">'
        f"{_VALUE}</parameter>{{% endfor %}}</invoke>{{% endfor %}}</minimax:tool_call>"
    ),
    "phi_4": f"<|tool_call|>{_LIST}<|/tool_call|>",
    "granite_3": f"<|tool_call|>{_LIST}",
    "nemotron_2": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "tool_calls": f"<tool_calls>{_LIST}</tool_calls>",
    "apertus": (
        f'<|tools_prefix|>[{_EACH}{{"{{{{ c.function.name }}}}": {{{{ c.function.arguments | tojson }}}}}}'
        "{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>"
    ),
    "cohere": (
        f'<|START_ACTION|>[{_EACH}{{"tool_call_id": "0", "tool_name": "{{{{ c.function.name }}}}", "parameters": '
        "{{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]<|END_ACTION|>"
    ),
    "functionary_v31": (
        f"{_EACH}<function={{{{ c.function.name }}}}>{{{{ c.function.arguments | tojson }}}}</function>{{% endfor %}}"
    ),
    "xlam": _LIST,
    "functools": f"{_EACH}{_JSON}{{{{ ',' if not loop.last }}}}{{% endfor %}}",
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "llama": f'{_EACH}{_JSON.replace("arguments", "parameters", 1)}{{{{ "; " if not loop.last }}}}{{% endfor %}}',
    "pythonic": _PYTHON,
}
"""The part of the template that writes the calls of message `m`, by format."""
CHANNELS = """\
{%- if tools %}<|start|>system<|message|>Tools: {{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}<|start|>assistant
{%- if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}
{%- for c in m.tool_calls[:1] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>
{{- c.function.arguments | tojson }}<|call|>{% endfor %}
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
RECIPIENTS = """\
{%- if tools %}<|im_start|>system
Write >>>${recipient}: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role != "assistant" %}{{ m.content }}{% elif m.content %}>>>all
{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}>>>{{ c.function.name }}
{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
>>>{% endif %}"""
WITHOUT_CALLS = """\
{%- if tools %}<|im_start|>system
SIGN {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that asks for calls and leaves them out, or breaks on them."""
WITHOUT_TOOLS = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def source_of(name: str) -> str:
    """Return the template of a format."""
    if name in ("harmony", "functionary_v32"):
        return CHANNELS if name == "harmony" else RECIPIENTS
    source = _SKELETON.replace("CALLS", CALLS[name])
    return source.replace("Tools:", "Call them as functools[...]:") if name == "functools" else source


def without_quotes(quote: str = "") -> str:
    """Return a template that writes calls in Python's notation, with `quote` around values, whatever is in them."""
    value = f"{{{{ k }}}}={quote}{{{{ v }}}}{quote}"
    return _SKELETON.replace("CALLS", _PYTHON.replace("{{ k }}={{ v | tojson }}", value))


def write_model(folder: Path, source: str) -> Path:
    """Write the tokenizer side of a model with a chat template."""
    write_family(folder, FAMILIES["qwen3"])
    (folder / "chat_template.jinja").write_text(source)
    return folder

"""Chat templates of the families' forms, written for these tests."""

from pathlib import Path

from transformers import AutoTokenizer

from grpo_eqx.data.tokenizer import ChatTokenizer
from grpo_eqx.models.pretrained import model_folder

_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_ANSWER = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"


def _template(call: str, content: str = "{{ m.content }}") -> str:
    """A template of one form of calls; `f` is the function that is called."""
    calls = "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}"
    return (
        _TOOLS
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + _ANSWER
        + "{% else %}<|im_start|>{{ m.role }}\n"
        + content
        + calls
        + "<|im_end|>\n{% endif %}{% endfor %}"
        + _OPENS
    )


HERMES = _template(
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)
TAGS = _template(
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
LLAMA = _template('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}')
PYTHON = _template(
    "<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
    "{{ v | tojson if v is string else v }}{% if not loop.last %}, {% endif %}{% endfor %})]"
    "<|tool_call_end|>"
)
FORMS = {"hermes": HERMES, "tags": TAGS, "llama": LLAMA, "python": PYTHON}
CONTINUES_TURNS = (
    _TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
    "<|im_start|>assistant\n{% endif %}"
)
"""The model's turn goes on after the answers."""
FORGETS_CALLS = _template("")
FORGETS_THOUGHTS = _template(
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}",
)
UNKNOWN_CALLS = _template("[[{{ f.name }} {{ f.arguments | tojson }}]]")


def tokenizer_with(template: str) -> ChatTokenizer:
    """The embedded model's tokenizer with a template."""
    tokenizer = AutoTokenizer.from_pretrained(Path(model_folder("tiny_qwen2")))
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)

"""Mistakes of writing tools and environments, and what answers each."""

from tests.environments.templates import FORGETS_CALLS, FORGETS_THOUGHTS, UNKNOWN_CALLS

_DOC = '"""Looks.\\n\\n    Args:\\n        word: What for.\\n    """'
_LOOK = f"def look(word: str) -> str:\n    {_DOC}\n    return word\n"
_METHOD = _LOOK.replace("(word", "(self, word").replace("\n", "\n    ").rstrip()
_RESET = "def reset(self, **row):\n        return None\n"
_SHELF = f"class Shelf:\n    {_RESET}\n    {_METHOD}\n"
_GAME = (
    f"from grpo_eqx.environments import Environment, Step\n"
    f"class Game(Environment):\n    {_RESET}\n"
    "    def step(self, text):\n        return Step(done=True)\n"
)


def _template(text: str) -> str:
    return f"chat_template=file('template.jinja', {text!r})"


SCRIPTS = {
    "def look(word):\n    'Looks.'\ntrainer(tools=[look])": "tool look: Argument word is missing a",
    "def look(word: str):\n    return word\ntrainer(tools=[look])": (
        "describe the tool in one, with each argument under 'Args:'"
    ),
    "def look(word: str):\n    'Looks.'\ntrainer(tools=[look])": (
        "list each argument under 'Args:', as in 'x: the first number'"
    ),
    "def look(*words: str):\n    'Looks.'\ntrainer(tools=[look])": (
        "tool look takes *words, whose names the model cannot know: name each argument"
    ),
    "def look(**words: str):\n    'Looks.'\ntrainer(tools=[look])": "tool look takes **words",
    f"{_LOOK}trainer(tools=[look, look])": "2 tools have the name look: give each a name",
    f"{_LOOK}trainer(tools=look)": "pass a list of functions, as in tools=[multiply]",
    "trainer(tools='look')": "tools is 'look': pass a list of functions",
    f"{_LOOK}trainer(tools={{'look': look}})": "pass a list of functions",
    "trainer(tools=3)": "tools is 3: pass a list of functions",
    "trainer(tools=[3])": "tool 3 is not a function: pass functions",
    f"{_SHELF}trainer(tools=[Shelf])": "is a class: pass functions, or pass the class as",
    f"{_LOOK}import functools\ntrainer(tools=[functools.partial(look, 'a')])": (
        "is of type partial: wrap it in a function with a docstring"
    ),
    "trainer(tools=[lambda word: word])": "tool <lambda>",
    f"{_LOOK}GRPOConfig(tools=[look])": "GRPOTrainer takes tools and environments",
    f"{_SHELF}trainer(environment_factory=Shelf())": "pass a class, not an instance of it",
    "trainer(environment_factory='Shelf')": "environment_factory is 'Shelf': pass a class",
    "trainer(environment_factory={})": "environment_factory is an empty dict: give at least one",
    f"{_SHELF}trainer(environment_factory={{'shelf': Shelf()}})": "environment_factory['shelf'] is",
    f"{_SHELF}trainer(environment_factory=lambda name: Shelf())": (
        "pass a class, or a function, that needs no arguments"
    ),
    "class Shelf:\n    def __init__(self):\n        raise OSError('no disk')\n"
    "trainer(environment_factory=Shelf)": "raised OSError: no disk (",
    "trainer(environment_factory=lambda: None)": "returned None: return an environment",
    f"{_SHELF}trainer(environment_factory=lambda: Shelf)": "return an environment",
    "class Shelf:\n    pass\ntrainer(environment_factory=Shelf)": (
        "environment Shelf has no method reset: define one"
    ),
    "class Shelf:\n    reset = None\ntrainer(environment_factory=Shelf)": "has no method reset",
    f"class Shelf:\n    {_RESET}\n    def look(self, word):\n        'Looks.'\n"
    "trainer(environment_factory=Shelf)": (
        "environment Shelf: method look: Argument word is missing"
    ),
    f"class Shelf:\n    {_RESET}\n    def look(self, word: str):\n        return word\n"
    "trainer(environment_factory=Shelf)": "environment Shelf: method look",
    f"{_LOOK}{_SHELF}trainer(tools=[look], environment_factory=Shelf)": (
        "2 tools have the name look: give each a name of its own"
    ),
    f"{_SHELF.replace('**row', 'level')}trainer(environment_factory=Shelf)": (
        "environment Shelf: reset needs level, and gets prompt"
    ),
    f"{_SHELF}trainer(environment_factory={{'shelf': Shelf}})": (
        "a problem has no column environment, which says its environment: pass train_data with it"
    ),
    f"{_SHELF}trainer(environment_factory={{'shelf': Shelf}}, train_data=[{{'question': 'Where?', "
    "'environment': 'shop'}] * 40)": "the column environment of a problem is 'shop': use shelf",
    f"{_GAME}{_LOOK}trainer(tools=[look], environment_factory=Game)": (
        "environment Game takes whole turns by step, and tools are passed: pass no tools"
    ),
    "from grpo_eqx.environments import Environment\n"
    f"class Game(Environment):\n    {_RESET}\n"
    "trainer(environment_factory=Game)": "abstract method",
    f"{_SHELF}trainer(environment_factory=Shelf, train_data=None)": (
        "environment Shelf makes the prompts and has no get_reward: define it, or pass reward_funcs"
    ),
    f"{_LOOK}trainer(tools=[look])": "the chat template leaves out the schemas of tools: use a",
    f"{_LOOK}trainer(tools=[look], {_template(FORGETS_CALLS)})": "leaves out the model's calls",
    f"{_LOOK}trainer(tools=[look], {_template(FORGETS_THOUGHTS)})": (
        "the chat template renders a turn of the model otherwise once others follow it"
    ),
    f"{_LOOK}trainer(tools=[look], {_template(UNKNOWN_CALLS)})": (
        "in a format that is unknown here: set the tokenizer's response_template"
    ),
    f"{_LOOK}trainer(tools=[look], train_data=[{{'prompt': '1 + 1 ='}}] * 40)": (
        "tools or environments are passed, and the problems are texts that the model continues"
    ),
    f"{_LOOK}trainer(tools=[look], rollout_func=lambda prompts, trainer: {{}})": (
        "rollout_func is passed, and so are tools or environments, which it would have to call"
    ),
    "trainer(rollout_func='mine')": "rollout_func is 'mine': pass a function of the prompts and",
    "trainer(harness=3)": "harness is 3: use a string or None",
    "trainer(harness_timeout=3.0)": "harness_timeout is 3.0, and no harness is passed",
    "trainer(tool_timeout=3.0)": "and no tools or environments are passed: it would do nothing",
    "trainer(tool_workers=2)": "no plain functions are passed as tools: it would do nothing",
    f"{_LOOK}trainer(tools=[look], tool_workers=2)": (
        "with tool_workers, define it at the top level of a module that can be imported, such as"
    ),
    "trainer(tool_timeout=0)": "tool_timeout is 0: it must be above 0 and finite",
    "trainer(tool_failures='ignore')": "tool_failures is 'ignore': use answer or stop",
    f"{_LOOK}trainer(tools=[look], tool_response_truncate_side='left')": (
        "and without max_tool_response_length nothing is truncated: set that, or leave it off"
    ),
    f"{_LOOK.replace('word: str', 'self, word: str')}trainer(tools=[look])": "tool look takes self",
    f"{_SHELF}Shelf.close = lambda self, force: 0\ntrainer(environment_factory=Shelf)": (
        "environment Shelf: close needs force, and is called without arguments: take it off"
    ),
    f"{_SHELF}Shelf.get_reward = lambda self, completions: 1\ntrainer(environment_factory=Shelf)": (
        "environment Shelf: get_reward needs completions, and is called without arguments"
    ),
    f"{_SHELF}trainer(environment_factory=[Shelf])": "pass a dict of classes by name, of which",
    "trainer(tool_response_truncate_side='end')": "use left, middle or right",
    "trainer(max_tool_calling_iterations=0)": "it must be at least 1",
    "trainer(max_tool_response_length=-1)": "it must be at least 1",
    "trainer(reward_funcs=lambda environments, **columns: [0.0] * len(environments))": (
        "asks for environments, which it does not get: pass environment_factory to GRPOTrainer"
    ),
    f"{_SHELF}def Shelf_(**columns): return 0\nShelf.get_reward = lambda self: 1.0\n"
    "trainer(environment_factory=Shelf, reward_funcs={'Shelf': Shelf_})": (
        "the name Shelf, which is that of a penalty or an environment of this run"
    ),
    "trainer(chat_template_kwargs={'enable thinking': False})": "write NAME=VALUE with a value in",
    "trainer(chat_template_kwargs=['enable_thinking'])": "as in enable_thinking=false",
    "trainer(chat_template_kwargs={'thinking': False})": "which the chat template does not read",
    f"{_SHELF}Other = type('Shelf', (Shelf,), {{}})\n"
    "Shelf.get_reward = lambda self: 1.0\n"
    "trainer(environment_factory={'a': Shelf, 'b': Other})": (
        "2 classes of environments have the name Shelf, under which their rewards are logged"
    ),
}
"""Scripts, and a part of the sentence that answers each."""

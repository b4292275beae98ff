"""How a problem is asked: signature with docstring, plain words, tests, or about given code."""

import ast
import random
import re
import textwrap
from collections.abc import Callable

from dspark.training.families import Problem, compile_function

Wrapper = Callable[[Problem, random.Random], str | None]

_STUB_INTROS = (
    "Complete this function so that the examples in its docstring hold:",
    "Write a solution to this problem and make sure the tests pass:",
    "Solve the following problem in Python. Your solution must pass the tests:",
    "Implement the function below:",
    "Finish the body of this Python function:",
    "Here is a signature and a docstring. Write the whole function:",
    "Write code that solves the problem below and agrees with all of its examples:",
)
_PLAIN = (
    "Write a function to {ask}.",
    "Write a function to {ask}.",
    "Write a python function to {ask}.",
    "Write a Python function `{name}` to {ask}.",
    "Implement `{signature}`. It should {ask}.",
    "In Python, how would you {ask}?",
    "I need a Python function to {ask}. For example, `{call}` should return `{result}`.",
    "Create a Python function called {name}. It should {ask}. Show one example of its use.",
    "Please write Python code to {ask}. Explain it briefly.",
)
_TESTED = (
    "You are an expert Python programmer, and this is your task: write a function to {ask}. "
    "Your code should pass these tests:\n\n{tests}",
    "You are an experienced Python developer. Write a function to {ask}. "
    "It has to pass the following tests:\n\n{tests}\n",
    "Write a python function to {ask}.\n\nYour code should satisfy these tests:\n\n{tests}",
    "Task: {ask}.\nTests:\n```python\n{tests}\n```\nWrite the Python function.",
)
_ABOUT_CODE = (
    "Explain what this Python function does, step by step:\n{code}",
    "Explain this code to a beginner:\n{code}",
    "Add type hints and a docstring to this function:\n{bare}",
    "Write unit tests with pytest for this function:\n{code}",
    "Write a few assert statements that test `{name}`, edge cases included:\n{code}",
    "What is the time complexity of this function, and why?\n{code}",
    "What does `{call}` return, and why?\n{bare}",
    "Review this function and suggest improvements:\n{code}",
    "Rewrite this function in another way that gives the same results:\n{code}",
    "Add comments to this code:\n{bare}",
    "Summarise in one sentence what `{name}` does:\n{bare}",
)
_MUTATIONS = (
    (" < ", " <= "),
    (" > ", " >= "),
    (" <= ", " < "),
    (" == ", " != "),
    (" + 1", " - 1"),
    ("max(", "min("),
    ("min(", "max("),
    ("[::-1]", "[:-1]"),
    (" and ", " or "),
    (" or ", " and "),
    (" not in ", " in "),
    ("reverse=True", "reverse=False"),
    (" * ", " + "),
    (" - ", " + "),
    ("[1:]", "[2:]"),
)


def stub(problem: Problem, rng: random.Random) -> str:
    """A signature and a docstring with examples, in a fenced block."""
    signature, imports = _restyle(problem.signature, rng.choice(("typing", "builtin", "bare")))
    described = textwrap.fill(_sentence(problem.ask) + ".", 92, subsequent_indent="    ")
    examples = "".join(
        f"    >>> {problem.call(example)}\n    {example.result!r}\n" for example in problem.examples
    )
    opening = rng.choice(('"""', '""" '))
    code = f'{imports}{signature}\n    {opening}{described}\n{examples}    """\n'
    return f"{rng.choice(_STUB_INTROS)}\n```python\n{code}```"


def plain(problem: Problem, rng: random.Random) -> str:
    """The task in words."""
    example = problem.examples[0]
    return rng.choice(_PLAIN).format(
        ask=problem.ask,
        name=problem.name,
        signature=problem.signature.removeprefix("def ").removesuffix(":"),
        call=problem.call(example),
        result=repr(example.result),
    )


def with_tests(problem: Problem, rng: random.Random) -> str:
    """The task in words, with assertions."""
    tests = "\n".join(
        f"assert {problem.call(example)} == {example.result!r}" for example in problem.examples
    )
    return rng.choice(_TESTED).format(ask=problem.ask, tests=tests)


def about_code(problem: Problem, rng: random.Random) -> str:
    """A question about the reference solution."""
    return rng.choice(_ABOUT_CODE).format(
        name=problem.name,
        code=_fence(problem.source),
        bare=_fence(_without_hints(problem.source)),
        call=problem.call(problem.examples[0]),
    )


def bug(problem: Problem, rng: random.Random) -> str | None:
    """The reference with one change that breaks an example; None where no change does."""
    if "while " in problem.source or problem.source.count(f"{problem.name}(") > 1:
        return None  # a broken loop or recursion might not end
    for old, new in rng.sample(_MUTATIONS, len(_MUTATIONS)):
        broken = problem.source.replace(old, new, 1)
        failure = _first_failure(problem, broken) if broken != problem.source else None
        if failure:
            return (
                f"This function has a bug: {failure}. It should {problem.ask}. "
                f"Find the bug and fix it.\n{_fence(broken)}"
            )
    return None


def _first_failure(problem: Problem, source: str) -> str | None:
    function = compile_function(source, problem.name)
    for example in problem.examples:
        try:
            result = function(*example.arguments)
        except Exception as error:  # whatever a broken function raises belongs in the prompt
            return f"`{problem.call(example)}` raises {type(error).__name__}"
        if result != example.result:
            call = problem.call(example)
            return f"`{call}` returns `{result!r}` instead of `{example.result!r}`"
    return None


def _sentence(ask: str) -> str:
    return ask[0].upper() + ask[1:]


def _fence(source: str) -> str:
    return f"```python\n{source}\n```"


def _restyle(signature: str, style: str) -> tuple[str, str]:
    """The signature with hints as in `typing`, as built-ins or without; and its imports."""
    if style == "bare":
        return _without_hints(f"{signature}\n    pass").splitlines()[0], ""
    if style == "builtin":
        return signature, ""
    used = [kind for kind in ("Dict", "List", "Tuple") if f"{kind.lower()}[" in signature]
    for kind in used:
        signature = re.sub(rf"\b{kind.lower()}\[", f"{kind}[", signature)
    return signature, f"from typing import {', '.join(used)}\n\n\n" if used else ""


def _without_hints(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    return ast.unparse(tree)

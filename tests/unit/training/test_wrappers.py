import ast
import random
import re

import pytest

from dspark.training.families import Problem, compile_function, load_families, realise
from dspark.training.wrappers import about_code, bug, plain, stub, with_tests


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [realise(family, random.Random(7)) for family in load_families()]


def _fenced(prompt: str) -> str:
    return prompt.split("```python\n")[1].split("```")[0]


def test_a_stub_is_valid_python_whose_examples_hold(problems: list[Problem]) -> None:
    for problem in problems:
        prompt = stub(problem, random.Random(1))
        ast.parse(_fenced(prompt))
        function = compile_function(problem.source, problem.name)
        shown = re.findall(r">>> (.*)\n    (.*)\n", prompt)
        assert len(shown) == len(problem.examples)
        for call, result in shown:
            assert eval(call, {problem.name: function}) == ast.literal_eval(result), prompt


def test_a_stub_declares_what_its_hints_use(problems: list[Problem]) -> None:
    for problem in problems:
        for seed in range(6):
            exec(_fenced(stub(problem, random.Random(seed))), {})


def test_shown_tests_pass(problems: list[Problem]) -> None:
    for problem in problems:
        function = compile_function(problem.source, problem.name)
        tests = re.findall(r"^assert .*$", with_tests(problem, random.Random(2)), re.MULTILINE)
        assert len(tests) == len(problem.examples)
        for test in tests:
            exec(test, {problem.name: function})


def test_a_bug_is_a_real_bug(problems: list[Problem]) -> None:
    broken = [(p, prompt) for p in problems if (prompt := bug(p, random.Random(3)))]
    assert len(broken) > len(problems) / 3
    for problem, prompt in broken:
        function = compile_function(_fenced(prompt), problem.name)

        def fails(example, function=function) -> bool:
            try:
                return function(*example.arguments) != example.result
            except Exception:
                return True

        assert any(fails(example) for example in problem.examples), prompt


@pytest.mark.parametrize("wrapper", [plain, about_code])
def test_wrappers_leave_nothing_unfilled(problems: list[Problem], wrapper) -> None:
    for problem in problems:
        for seed in range(12):
            prompt = wrapper(problem, random.Random(seed))
            assert not re.search(r"\{(ask|name|signature|call|result|code|bare)\}", prompt)
            if "```" in prompt:
                ast.parse(_fenced(prompt))

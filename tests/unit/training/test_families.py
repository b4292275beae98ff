"""The reference solutions, and the examples that are computed with them."""

import random
import re

import pytest

from dspark.training.families import Problem, compile_function, load_families, realise

# Worked out by hand, not with the references.
CASES = [
    ("digit_squares", (12,), 5),
    ("even_digit_sum", (1234,), 6),
    ("collatz_steps", (6,), 8),
    ("is_perfect", (28,), True),
    ("is_abundant", (12,), True),
    ("pentagonal_number", (4,), 22),
    ("sum_of_multiples", (3, 5, 10), 23),
    ("to_roman", (1994,), "MCMXCIV"),
    ("lcm_of_list", ([4, 6, 10],), 60),
    ("pounds_to_kilograms", (10.0,), 4.54),
    ("format_seconds", (3723,), "1:02:03"),
    ("min_coins", ([4, 9], 17), 3),
    ("min_coins", ([4, 9], 7), -1),
    ("make_change", (68, [50, 10, 5, 1]), {50: 1, 10: 1, 5: 1, 1: 3}),
    ("pascal_row", (4,), [1, 4, 6, 4, 1]),
    ("is_leap_year", (1900,), False),
    ("is_armstrong", (371,), True),
    ("count_primes", (30,), 10),
    ("next_prime", (13,), 17),
    ("digital_root", (987,), 6),
    ("reverse_integer", (-120,), -21),
    ("rectangle_diagonal", (3.0, 4.0), 5.0),
    ("manhattan_distance", ((1, 2), (4, -2)), 7),
    ("is_power_of_3", (27,), True),
    ("is_power_of_3", (6,), False),
    ("lucas_number", (5,), 11),
    ("pell_number", (4,), 12),
    ("round_up_to", (13, 5), 15),
    ("triangle_kind", (2, 2, 5), "invalid"),
    ("keep_even", ([3, 4, -2, 7],), [4, -2]),
    ("sum_threes", ([3, 4, -6, 7],), -3),
    ("smallest_in_range", ([3, 99],), None),
    ("square_all", ([2, -3],), [4, 9]),
    ("running_product", ([1, 2, 3],), [1, 2, 6]),
    ("k_largest", ([5, 1, 9, 3], 2), [9, 5]),
    ("second_largest", ([7, 7, 3],), 3),
    ("split_into_chunks", ([1, 2, 3], 2), [[1, 2], [3]]),
    ("rotate_right", ([1, 2, 3, 4], 5), [4, 1, 2, 3]),
    ("move_to_end", ([0, 1, 0, 2], 0), [1, 2, 0, 0]),
    ("find_pair", ([4, 1, 6], 10), (0, 2)),
    ("longest_increasing_run", ([1, 2, 2, 3, 4],), 3),
    ("max_subarray_sum", ([-2, 3, -1, 4, -9],), 6),
    ("merge_sorted", ([1, 4], [2, 3, 9]), [1, 2, 3, 4, 9]),
    ("moving_average", ([1, 2, 6], 2), [1.5, 4.0]),
    ("binary_search", ([1, 3, 8], 8), 2),
    ("missing_number", ([1, 2, 4],), 3),
    ("balance_index", ([1, 7, 3, 6, 5, 6],), 3),
    ("bubble_sort", ([3, 1, 2],), [1, 2, 3]),
    ("gnome_sort", ([3, 1, 2],), [1, 2, 3]),
    ("combinations_of", ([1, 2, 3], 2), [[1, 2], [1, 3], [2, 3]]),
    ("merge_intervals", ([[5, 7], [1, 3], [2, 4]],), [[1, 4], [5, 7]]),
    ("local_peaks", ([1, 3, 2, 5],), [3]),
    ("josephus", (5, 2), 2),
    ("count_vowels", ("Audio",), 4),
    ("long_words", (["a", "table"],), ["table"]),
    ("reverse_word_order", ("one two",), "two one"),
    ("run_length_encode", ("aab",), "a2b1"),
    ("run_length_decode", ("a2b1",), "aab"),
    ("caesar", ("xyZ!", 3), "abC!"),
    ("atbash", ("abz 1",), "zya 1"),
    ("kebab_to_camel", ("one-two",), "oneTwo"),
    ("truncate", ("abcdefgh", 6), "abc..."),
    ("extract_prices", ("Paid $12.50 and $3",), ["$12.50", "$3"]),
    ("is_clock_time", ("24:10",), False),
    ("parse_pairs", ("a=1; b = 2",), {"a": "1", "b": "2"}),
    ("expand_ranges", ("1-3,7",), [1, 2, 3, 7]),
    ("evaluate_rpn", ("5 1 2 + *",), 15),
    ("edit_distance", ("kitten", "sitting"), 3),
    ("pig_latin", ("stone",), "onestay"),
    ("invert_dict", ({"a": 1, "b": 2, "c": 1},), {1: ["a", "c"], 2: ["b"]}),
    ("flatten_dict", ({"k": {}},), {}),
    ("transpose", ([[1, 2], [3, 4]],), [[1, 3], [2, 4]]),
    ("rotate_clockwise", ([[1, 2], [3, 4]],), [[3, 1], [4, 2]]),
    ("spiral", ([[1, 2], [3, 4]],), [1, 2, 4, 3]),
    ("multiply_matrices", ([[1, 2], [3, 4]], [[0, 1], [1, 0]]), [[2, 1], [4, 3]]),
    ("days_between", ("2024-02-28", "2024-03-01"), 2),
    ("weekday_name", ("2000-01-01",), "Saturday"),
    ("minutes_between", ("22:15", "06:00"), 465),
    ("deep_flatten", ([1, [2, [3]]],), [1, 2, 3]),
    ("nesting_depth", ([1, [2, [3]]],), 3),
    ("hanoi_moves", (2,), [("A", "B"), ("A", "C"), ("B", "C")]),
    ("grid_paths", (3, 3), 6),
    ("can_make_sum", ([3, 34, 4], 7), True),
    ("all_permutations", ("aab",), ["aab", "aba", "baa"]),
    ("shortest_path_length", ({"a": ["b"], "b": ["c"], "c": []}, "a", "c"), 2),
    ("tree_height", ((1, None, (2, None, None)),), 2),
    ("robot_position", ("UURD",), (1, 1)),
]


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    """Many fillings of every family, by function name."""
    found: dict[str, Problem] = {}
    for family in load_families():
        for seed in range(40):
            problem = realise(family, random.Random(seed))
            found.setdefault(problem.name, problem)
    return found


@pytest.mark.parametrize(("name", "arguments", "expected"), CASES)
def test_references_agree_with_cases_worked_out_by_hand(
    problems: dict[str, Problem], name: str, arguments: tuple, expected: object
) -> None:
    assert compile_function(problems[name].source, name)(*arguments) == expected


def test_there_are_many_families() -> None:
    assert len(load_families()) >= 150


def test_every_problem_is_filled_and_has_true_examples(problems: dict[str, Problem]) -> None:
    for name, problem in problems.items():
        assert 2 <= len(problem.examples) <= 4, name
        assert not re.search(r"\$\{?[a-z]", problem.source + problem.ask), name
        function = compile_function(problem.source, name)
        for example in problem.examples:
            assert function(*example.arguments) == example.result, name


def test_asks_are_phrases_that_follow_to(problems: dict[str, Problem]) -> None:
    for name, problem in problems.items():
        assert problem.ask[0].islower(), name
        assert problem.ask[-1] not in ".?!", name


def test_yes_or_no_questions_show_both_answers(problems: dict[str, Problem]) -> None:
    answers = {
        name: {example.result for example in problem.examples}
        for name, problem in problems.items()
        if problem.signature.endswith("-> bool:")
    }
    both = sum(found == {True, False} for found in answers.values())
    assert both > 0.9 * len(answers)


def test_a_reference_cannot_change_its_arguments() -> None:
    values = [[2, 1]]
    sort = compile_function("def f(v):\n    v[0].sort()\n    return v", "f")
    assert sort(values) == [[1, 2]]
    assert values == [[2, 1]]

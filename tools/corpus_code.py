"""Python for the tiny pair: functions, modules, classes, loops.

Invariant: a function's example is run when it is made, and its value is compared with an oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from corpus_words import Pair, Rng, join_words


class Task(NamedTuple):
    """A code task: `{x}` is the argument, `{k}` a constant, `example` the argument of a call."""

    names: str
    what: str
    body: str
    why: str
    example: str
    oracle: Callable[..., object]


TASKS: tuple[Task, ...] = (
    Task("sum_even add_evens even_total", "returns the sum of the even numbers in a list {x}",
         "    total = 0\n    for value in {x}:\n        if value % 2 == 0:\n"
         "            total += value\n    return total",
         "The loop adds a value only if it can be divided by 2.", "[1, 2, 3, 4]",
         lambda x, k: sum(v for v in x if v % 2 == 0)),
    Task("multiples_of_k divisible filter_multiples", "keeps the numbers in {x} divisible by {k}",
         "    return [value for value in {x} if value % {k} == 0]",
         "The list keeps every value that leaves no remainder when divided by {k}.",
         "[6, 10, 12, 15, 20]", lambda x, k: [v for v in x if v % k == 0]),
    Task("count_above number_above how_many_above", "counts the values in {x} greater than {k}",
         "    count = 0\n    for value in {x}:\n        if value > {k}:\n            count += 1\n"
         "    return count", "The counter grows by one for each value above {k}.", "[3, 8, 14, 5]",
         lambda x, k: len([v for v in x if v > k])),
    Task("scale multiply_all times", "multiplies every number in {x} by {k}",
         "    return [value * {k} for value in {x}]",
         "Each value is multiplied by {k}, and the order stays the same.", "[1, 2, 3]",
         lambda x, k: [v * k for v in x]),
    Task("shift add_to_all increase", "adds {k} to every number in {x}",
         "    result = []\n    for value in {x}:\n        result.append(value + {k})\n"
         "    return result", "Each value grows by {k}, and the input is not changed.",
         "[1, 2, 3]", lambda x, k: [v + k for v in x]),
    Task("largest find_max biggest", "returns the largest number in {x} without using max",
         "    best = {x}[0]\n    for value in {x}[1:]:\n        if value > best:\n"
         "            best = value\n    return best",
         "The variable best always holds the largest value seen so far.", "[4, 9, 2]",
         lambda x, k: sorted(x)[-1]),
    Task("smallest find_min lowest", "returns the smallest number in {x} without using min",
         "    best = {x}[0]\n    for value in {x}[1:]:\n        if value < best:\n"
         "            best = value\n    return best",
         "The variable best always holds the smallest value seen so far.", "[4, 9, 2]",
         lambda x, k: sorted(x)[0]),
    Task("average mean_value mean", "returns the average of the numbers in {x}",
         "    if not {x}:\n        return 0.0\n    return sum({x}) / len({x})",
         "An empty list has the average 0.0, so there is no division by zero.", "[2, 4, 6]",
         lambda x, k: 4.0),
    Task("reverse_text backwards flip", "returns the text {x} backwards",
         "    return {x}[::-1]", "The slice with step -1 reads the text from its end.",
         "'stone'", lambda x, k: "".join(reversed(x))),
    Task("is_palindrome same_backwards mirrors", "tells whether the text {x} is a palindrome",
         "    clean = {x}.lower().replace(' ', '')\n    return clean == clean[::-1]",
         "Spaces and upper case are ignored before the text is compared with its reverse.",
         "'Never odd or even'", lambda x, k: True),
    Task("count_vowels vowels number_of_vowels", "counts the vowels in the text {x}",
         "    count = 0\n    for letter in {x}.lower():\n        if letter in 'aeiou':\n"
         "            count += 1\n    return count",
         "The text is made lower case first, so upper case vowels count as well.", "'Banana'",
         lambda x, k: 3),
    Task("first_words take_words head", "returns the first {k} words of the text {x}",
         "    words = {x}.split()\n    return ' '.join(words[:{k}])",
         "The text is split at spaces, and only the first {k} words are joined again.",
         "'one two three four five six seven eight nine ten eleven'",
         lambda x, k: " ".join(x.split()[:k])),
    Task("repeat_text repeat many_times", "repeats the text {x} {k} times with a dash between",
         "    return '-'.join([{x}] * {k})",
         "The list holds the text {k} times, and join puts a dash between the copies.", "'ha'",
         lambda x, k: "-".join(x for _ in range(k))),
    Task("factorial fact product_up_to", "returns the factorial of {x}",
         "    result = 1\n    for i in range(2, {x} + 1):\n        result *= i\n    return result",
         "The loop multiplies all whole numbers from 2 up to the argument.", "5",
         lambda x, k: 120),
    Task("fibonacci fib fib_number", "returns the Fibonacci number with index {x}",
         "    a, b = 0, 1\n    for _ in range({x}):\n        a, b = b, a + b\n    return a",
         "Each step moves one place forward in the sequence.", "7", lambda x, k: 13),
    Task("power_of raise_to to_the_power", "raises {x} to the power {k} with a loop",
         "    result = 1\n    for _ in range({k}):\n        result *= {x}\n    return result",
         "The loop multiplies by the argument {k} times.", "2", lambda x, k: 2**k),
    Task("is_prime prime check_prime", "tells whether {x} is a prime number",
         "    if {x} < 2:\n        return False\n    divisor = 2\n"
         "    while divisor * divisor <= {x}:\n        if {x} % divisor == 0:\n"
         "            return False\n        divisor += 1\n    return True",
         "It is enough to try divisors up to the square root.", "13", lambda x, k: True),
    Task("digit_sum sum_digits add_digits", "returns the sum of the digits of {x}",
         "    total = 0\n    while {x} > 0:\n        total += {x} % 10\n        {x} //= 10\n"
         "    return total", "Each pass adds the last digit and then removes it.", "347",
         lambda x, k: 14),
    Task("unique remove_duplicates distinct", "removes duplicates from {x} and keeps the order",
         "    seen = set()\n    result = []\n    for value in {x}:\n"
         "        if value not in seen:\n            seen.add(value)\n"
         "            result.append(value)\n    return result",
         "The set remembers the values that were already added.", "[3, 1, 3, 2, 1]",
         lambda x, k: list(dict.fromkeys(x))),
    Task("count_items tally frequency", "counts how often each value occurs in {x}",
         "    counts = {{}}\n    for value in {x}:\n"
         "        counts[value] = counts.get(value, 0) + 1\n    return counts",
         "The dictionary maps each value to the number of times it was seen.", "['a', 'b', 'a']",
         lambda x, k: {"a": 2, "b": 1}),
    Task("chunks split_list groups", "splits the list {x} into parts of length {k}",
         "    parts = []\n    for start in range(0, len({x}), {k}):\n"
         "        parts.append({x}[start:start + {k}])\n    return parts",
         "Each part has {k} values, and the last part may be shorter.", "[1, 2, 3, 4, 5]",
         lambda x, k: [x[i : i + k] for i in range(0, len(x), k)]),
    Task("rotate rotate_left turn", "moves the first {k} values of {x} to the end",
         "    cut = {k} % len({x})\n    return {x}[cut:] + {x}[:cut]",
         "The remainder keeps the cut inside the list even if {k} is larger than its length.",
         "[1, 2, 3, 4, 5]", lambda x, k: x[k % 5 :] + x[: k % 5]),
    Task("clamp limit cap", "limits the number {x} to the range from 0 to {k}",
         "    if {x} < 0:\n        return 0\n    if {x} > {k}:\n        return {k}\n    return {x}",
         "Values outside of the range are replaced by the nearest end.", "50",
         lambda x, k: min(x, k)),
    Task("is_sorted in_order ascending", "tells whether the list {x} is sorted",
         "    for left, right in zip({x}, {x}[1:]):\n        if left > right:\n"
         "            return False\n    return True",
         "It is enough to compare each value with the next one.", "[1, 3, 2]", lambda x, k: False),
    Task("flatten join_lists merge_lists", "flattens a list of lists {x}",
         "    result = []\n    for part in {x}:\n        result.extend(part)\n    return result",
         "Each inner list is added to the end of the result.", "[[1, 2], [3]]",
         lambda x, k: [1, 2, 3]),
    Task("bubble_sort sort_numbers sort_values", "sorts the list {x} with bubble sort",
         "    result = list({x})\n    for end in range(len(result) - 1, 0, -1):\n"
         "        for i in range(end):\n            if result[i] > result[i + 1]:\n"
         "                result[i], result[i + 1] = result[i + 1], result[i]\n    return result",
         "After each pass the largest remaining value stands at the end.", "[5, 2, 9, 1]",
         lambda x, k: sorted(x)),
)  # fmt: skip
SUFFIXES = ("", "", "_fast", "_simple", "_v2", "_safe", "_new", "_here")


@functools.cache
def _example(task: Task, code: str, name: str, k: int) -> str:
    scope: dict[str, Callable[[object], object]] = {}
    exec(code, scope)  # our own code: the example's value and a check of it
    argument = eval(task.example)
    value = scope[name](eval(task.example))
    assert value == task.oracle(argument, k), (code, value)
    return f"`{name}({task.example})` returns `{value!r}`"


def code_function(r: Rng) -> Pair:
    task = r.choice(TASKS)
    name = r.choice(task.names.split()) + r.choice(SUFFIXES)
    texty = task.example.startswith("'")
    number = task.example[0].isdigit()
    x = r.choice(
        ["text", "line", "word"]
        if texty
        else ["n", "number", "x"]
        if number
        else ["values", "numbers", "items", "data"]
    )
    k = r.randint(2, 12)
    what, why = task.what.format(x=f"`{x}`", k=k), task.why.format(k=k)
    doc, example = r.random() < 0.4, r.random() < 0.4
    head = f"def {name}({x}):\n"
    if doc:
        plain = task.what.format(x=x, k=k)
        head += f'    """{plain[0].upper()}{plain[1:]}."""\n'
    code = head + task.body.format(x=x, k=k)
    shown = _example(task, code, name, k)
    lead = r.choice(["Write a Python function", "Define a Python function", "I need a function"])
    prompt = f"{lead} `{name}` that {what}."
    prompt += " Add a docstring." if doc else ""
    prompt += " Show an example." if example else ""
    answer = f"```python\n{code}\n```\n\n{why}"
    return prompt, answer + (f" For example, {shown}." if example else "")


def code_module(r: Rng) -> Pair:
    count = r.randint(2, 4)
    chosen = r.sample(TASKS, count)
    k = r.randint(2, 12)
    names = [task.names.split()[r.randrange(3)] for task in chosen]
    whats = [
        f"`{name}` {task.what.format(x='`x`', k=k)}"
        for name, task in zip(names, chosen, strict=True)
    ]
    lead = r.choice(["Write a Python module in which", "I need a Python file where"])
    prompt = f"{lead} {'; '.join(whats)}."
    parts = []
    for name, task in zip(names, chosen, strict=True):
        code = f"def {name}(x):\n" + task.body.format(x="x", k=k)
        _example(task, code, name, k)
        parts.append(code)
    joined = "\n\n\n".join(parts)
    return prompt, f"```python\n{joined}\n```\n\nThe file has {count} functions: " + (
        join_words([f"`{name}`" for name in names]) + "."
    )


def code_class(r: Rng) -> Pair:
    kind = r.choice("Car Robot Player Book Shop Garden Boat Phone Card Bag Team Lamp".split())
    first, second = r.sample("name size color price speed level weight owner age".split(), 2)
    method = r.choice("describe summary show label report".split())
    prompt = (
        f"Write a Python class `{kind}` with the fields `{first}` and `{second}` and a "
        f"method `{method}` that returns both."
    )
    answer = (
        f"```python\nclass {kind}:\n    def __init__(self, {first}, {second}):\n"
        f"        self.{first} = {first}\n        self.{second} = {second}\n\n"
        f"    def {method}(self):\n"
        f'        return f"{kind}: {{self.{first}}}, {{self.{second}}}"\n```\n\n'
        f"The method `{method}` puts `{first}` and `{second}` into one line of text."
    )
    return prompt, answer


def code_loop(r: Rng) -> Pair:
    a, b, step = r.randint(0, 20), r.randint(30, 99), r.randint(2, 9)
    verb = r.choice(["prints", "shows"])
    what = r.choice(["square", "double", "half", "cube"])
    expr = {"square": "i * i", "double": "i * 2", "half": "i / 2", "cube": "i ** 3"}[what]
    prompt = (
        f"Write a Python loop that {verb} the {what} of each number from {a} to {b} in steps "
        f"of {step}."
    )
    answer = (
        f"```python\nfor i in range({a}, {b + 1}, {step}):\n    print(i, {expr})\n```\n\n"
        f"The range ends at {b + 1} because Python leaves out the last value."
    )
    return prompt, answer

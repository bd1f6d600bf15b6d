"""What docs/python-torch.md shows runs, and it names all that esmm.torch has."""

import doctest
import os
import re

import pytest

import need_torch  # noqa: F401

import esmm.torch

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "python-torch.md")


def text():
    with open(PAGE) as f:
        return f.read()


def test_docstrings():
    assert doctest.testmod(esmm.torch).failed == 0


@pytest.mark.parametrize("number", range(3))
def test_the_page(number, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", text(), flags=re.S | re.M)
    assert len(blocks) == 3
    exec(compile(blocks[number], PAGE, "exec"), {})
    assert capsys.readouterr().out


def test_all_names_are_documented():
    for name in esmm.torch.__all__:
        assert re.search(rf"\b{name}\b", text()), name

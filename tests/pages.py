"""The code of the pages of the documentation."""

import re


def python_of(text):
    """The blocks of Python in a page's text that a test can run."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)

"""Pictures of every page, for people: ``python -m tests.pages FOLDER``."""

import sys
from itertools import product
from pathlib import Path

from tests.pages.browser import SCHEMES, WIDTHS, picture
from tests.pages.test_pages import the_pages

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for (name, text), scheme, width in product(the_pages(folder).items(), SCHEMES, WIDTHS):
    picture(folder / f"{name}-{width}-{scheme}.png", text, scheme, width)

"""`python -m evcl`"""

from evcl.cli import main

main()

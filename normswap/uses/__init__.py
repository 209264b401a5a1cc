"""What the code of a model does with its modules besides calling each where it is a child: whoever takes a part of one,
by an index, in a loop, through another module or by handing it on, may see what no longer is there when it is folded.

What is not understood counts as a use of all that it may hold.
"""

from normswap.uses.code import Uses, uses_in

__all__ = ["Uses", "uses_in"]

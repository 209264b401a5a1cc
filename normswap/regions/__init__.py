"""Regions: what a norm is computed together with inside a larger forward, found in its source and replaced there.

``flow`` reads a forward, ``patterns`` finds the regions in it, ``rewrite`` puts calls of helpers in their place,
``helper`` is what then runs, ``spec`` is a region as data.
"""

"""The screens: replay, watch, chat. They read the store; they never import torch or transformers.

    text.py     ids to exact text, piece by piece         layers.py    numbers to classes, glyphs and colours
    data.py     one episode, ready to show (pure)         layout.py    tokens to lines of a given width (pure)
    plain.py    the same without a terminal               charts.py    curves and bars of characters (pure)

Everything above is free of textual; the rest are widgets and screens. Queries run in worker threads.
"""

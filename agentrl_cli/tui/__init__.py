"""The screens: runs, watch, replay, compare, what-if and chat, a folder each. They read the store and import no torch.

Shared code is in `common/`. Files named data, panels, view, plain, inspector and related, and there charts, text,
token_text, layers, layout, episode_view and reader, are free of textual; the rest are widgets and screens.
Queries run in the reader's thread. Screens open each other by name (`common/agent_screen.py`).
"""

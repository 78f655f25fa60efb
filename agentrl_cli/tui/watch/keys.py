"""The keys of the watch screen, and their help."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from agentrl_cli.tui.common.keys import with_ids

TABS = ("overview", "charts", "episodes", "groups", "tokens", "tools", "log", "config", "health")
WORKERS = "workers"
"""A tab more, on w, for runs whose episodes workers make."""
KEYS = (
    "1-9 tab  ↑/↓ choose  enter open  space freeze  f filter  y log axis  z zoom  [ ] range  r smooth  C compare run\n"
    "p pause  k checkpoint  E evaluate  + - rate  S set  X stop (all ask first)  x flagged  d health  ? keys  q detach"
)
KEYS_SMALL = "1-9 tab ↑/↓ enter open  p pause k save E eval X stop  ? keys  q detach"
HELP = """\
1 overview  2 charts  3 episodes  4 groups  5 tokens  6 tools  7 log  8 config  9 or d health, with what to try
w            the workers, if others than the process of the run make its episodes
tab          the next tab                       l       log
↑ ↓ pgup pgdn  choose, or scroll                enter   open it in replay (q comes back); of an alert: its episodes
space        freeze or resume                   x       the flagged episodes of this run
p            pause after this step, or resume   k       checkpoint now
E            evaluate now                       X       stop after this step and save
+ -          learning rate × or ÷ 1.5           S       set lr, steps, max_grad_norm, eval_every, save_every
C            other trainings' curves, up to four, under these; a chosen one again: away
/ .          find text on the page, the next match; on the overview: which metrics
f            charts: which metrics; log: which lines; episodes: which ones (o sorts them)
y z [ ] r    charts: log axis, zoom to the last steps, earlier or later steps, means of 5 and 20
s e          this screen as SVG; every metric as a CSV file
q            detach: the training goes on; `agentrl watch` attaches again
ctrl+c       asks: detach, stop after this step, stop now

Everything that changes the run asks first, goes through the store and is recorded as an event;
curves carry a mark at every such change. A dot of a curve is the mean of the steps in its column
(the axis says of how many, `means of 3`); r averages further.
"""

BINDINGS: list[BindingType] = with_ids(
    "watch",
    [
        *(Binding(str(i + 1), f"tab('{name}')", name, show=False) for i, name in enumerate(TABS)),
        Binding("tab", "next_tab", "next tab", show=False),
        Binding("j,down", "choose(1)", show=False),
        Binding("up", "choose(-1)", show=False),
        Binding("pagedown", "choose(15)", show=False),
        Binding("pageup", "choose(-15)", show=False),
        Binding("g,home", "choose(-1000000)", show=False),
        Binding("G,end", "choose(1000000)", show=False),
        Binding("enter", "open", "open"),
        Binding("space", "freeze", "freeze"),
        Binding("p", "control('pause')", "pause"),
        Binding("k", "control('checkpoint')", "checkpoint"),
        Binding("E", "control('evaluate')", "evaluate"),
        Binding("X", "control('stop')", "stop"),
        Binding("plus", "rate(1.5)", "raise the rate", show=False),
        Binding("minus", "rate(0.6667)", "lower the rate", show=False),
        Binding("S", "set", "set a knob"),
        Binding("f", "filter", "filter"),
        Binding("slash", "find", "find"),
        Binding("full_stop", "find_again", "find again", show=False),
        Binding("o", "sort", "sort the episodes"),
        Binding("y", "log", "log axis"),
        Binding("z", "zoom", "zoom"),
        Binding("left_square_bracket", "range(-1)", "earlier steps", show=False),
        Binding("right_square_bracket", "range(1)", "later steps", show=False),
        Binding("r", "smooth", "smooth"),
        Binding("C", "compare", "curves of other runs"),
        Binding("x", "problems", "flagged episodes"),
        Binding("s", "svg", "svg"),
        Binding("e", "export", "metrics as CSV"),
        Binding("l", "tab('log')", "log", show=False),
        Binding("w", "tab('workers')", "workers", show=False),
        Binding("d", "tab('health')", "health", show=False),
        Binding("ctrl+c", "interrupt", "leave or stop", show=False, priority=True),
        Binding("question_mark", "help", "keys"),
        Binding("q", "detach", "detach"),
        Binding("escape", "leave", show=False),
    ],
)

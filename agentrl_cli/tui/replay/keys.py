"""The keys of the replay screen, and their help."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from agentrl_cli.tui.common.keys import CLOSING, with_ids
from agentrl_cli.tui.common.layers import LAYERS, layer_key

KEYS = (
    "j/k turn  J/K ←/→ token  ↑/↓ line  h/l sibling  n/N episode  g/G ends  0-9 layer  / find  . again  ' flagged\n"
    "? all  q back  M read  f filter  R what if  c chat  e export  [ ] step  V checkpoints  t tag  m note  x same flag"
)
KEYS_SMALL = "j/k turn ←/→ token h/l sibling 0-9 layer tab pane / find ? keys q back"

HELP = """\
j k  next, previous turn          J K ← →  next, previous token
↑ ↓  a line down, up              pgup pgdn  a page
g G  first, last token            '  next token that stands out
h l  previous, next sibling of the group, at the same place
n N  next, previous episode of the list
i    the list itself              f  filter     o  sort
L    follow the newest episode of the run, until something moves
[ ]  the same task at the previous, next step
V    two checkpoints side by side on this task
v    where this parts from a sibling
/    find text                    .  the next match
R    what if: its calls again, re-roll from this turn, edit it
c    chat from here               x  episodes with the same flag
t m b  tags, note, bookmark (tag:mark lists them)
e    export: JSON lines, HTML page (episode or group), SVG
s    this screen as SVG           y  copy token, turn, link
P    other colours                space  fold the turn
B    the next branch alone, after the last all of them
M    read: messages, Markdown rendered, long JSON folded
I    the images, large; o there opens the file
tab  the rest of the right pane, or the next pane where one fits
q    back        mouse: a token, a sibling, a turn, the map

1 push     2 advantage     3 log-probability     4 entropy
5 ratio and clipping     6 mask     7 origin     8 plain
9 KL to the reference     0 gradient weight
Glyphs under the text are the layer. Push: 1 to 7 up, a to g down,
each twice the last; 7 and g: the run's strongest 5 %; 0: hardly moved
Filter: reward:<0.5 step:100..120 task:calc/* tool:calculator
flag:LOOP text:"4,5" outcome:failed -tag:seen
"""

_BINDINGS: list[BindingType] = [
    Binding("j", "turn(1)", "turn", show=False),
    Binding("k", "turn(-1)", "turn", show=False),
    Binding("J,right", "token(1)", "token", show=False),
    Binding("K,left", "token(-1)", "token", show=False),
    Binding("down", "line(1)", show=False),
    Binding("up", "line(-1)", show=False),
    Binding("pagedown", "page(1)", show=False),
    Binding("pageup", "page(-1)", show=False),
    Binding("g,home", "end(0)", show=False),
    Binding("G,end", "end(1)", show=False),
    Binding("h", "sibling(-1)", "sibling", show=False),
    Binding("l", "sibling(1)", "sibling", show=False),
    Binding("n", "episode(1)", "next episode", show=False),
    Binding("N", "episode(-1)", "previous episode", show=False),
    *(
        Binding(layer_key(i), f"layer('{name}')", layer.title, show=False)
        for i, (name, layer) in enumerate(LAYERS.items())
    ),
    Binding("slash", "find", "find"),
    Binding("full_stop", "find_again", "find again", show=False),
    Binding("apostrophe", "next_flagged", "next flagged token", show=False),
    Binding("f", "filter", "filter"),
    Binding("o", "sort", "sort"),
    Binding("i", "list", "episodes"),
    Binding("v", "diff", "diff"),
    Binding("space", "fold", "fold"),
    Binding("e", "export", "export"),
    Binding("y", "copy", "copy"),
    Binding("s", "svg", "svg"),
    Binding("left_square_bracket", "step(-1)", "previous step", show=False),
    Binding("right_square_bracket", "step(1)", "next step", show=False),
    Binding("V", "versions", "checkpoints side by side"),
    Binding("R", "whatif", "what if"),
    Binding("c", "chat", "chat from here"),
    Binding("x", "same_flag", "episodes with the same flag"),
    Binding("t", "tag", "tag"),
    Binding("m", "note", "note"),
    Binding("b", "bookmark", "bookmark"),
    Binding("L", "follow", "follow the newest episode"),
    Binding("B", "branch", "next branch"),
    Binding("M", "read", "read as messages"),
    Binding("I", "images", "images"),
    Binding("P", "palette", "colours"),
    Binding("tab", "pane", "pane", show=False),
    *CLOSING,
]

BINDINGS = with_ids("replay", _BINDINGS)

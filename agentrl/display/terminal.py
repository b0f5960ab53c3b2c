"""An episode as text in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.display.view import EpisodeView, ShownToken, SpokenText, TurnView

_SPEAKERS = {"system": "magenta", "developer": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}


def print_view(view: EpisodeView, console: Console | None = None) -> None:
    """Print an episode; None: to standard output."""
    console = console or Console()
    console.print(Text(view.heading, style="bold"))
    console.print(Text("  " + ", ".join(view.facts), style="dim"))
    if view.failure is not None:
        console.print(Text("  failed: " + view.failure, style="red"))
    for turn in view.turns:
        console.print()
        _print_turn(turn, console)


def _print_turn(turn: TurnView, console: Console) -> None:
    console.print(Text(turn.heading, style="bold"), Text(", ".join(turn.facts), style="dim"))
    for message in (*turn.messages, turn.answer):
        console.print(_spoken_line(message))
    if turn.tokens:
        console.print(_token_table(turn.tokens))


def _spoken_line(message: SpokenText) -> Text:
    style = _SPEAKERS.get(message.speaker, "blue")
    return Text.assemble((f"  {message.speaker}: ", f"bold {style}"), message.text)


def _token_table(tokens: tuple[ShownToken, ...]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("token")
    for name in ("loss", "version", "log-prob", "probability"):
        table.add_column(name, justify="right")
    context = [token for token in tokens if token.logprob is None]
    if context:
        joined = " ".join(repr(token.text)[1:-1] for token in context)
        table.add_row(Text(joined, style="dim"), Text("0"), Text(f"{len(context)} of context", style="dim"))
    for token in tokens:
        if token.logprob is None or token.probability is None:
            continue
        table.add_row(
            Text(repr(token.text)[1:-1]),
            Text("1" if token.in_loss else "0"),
            Text(str(token.version)),
            Text(f"{token.logprob:.3f}"),
            Text(f"{token.probability:.3f}"),
        )
    return table

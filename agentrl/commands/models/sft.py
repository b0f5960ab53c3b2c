"""`agentrl sft`: a supervised warm start on the conversations of a file.

Invariant: the tokens that the student learns to sample are those that a rollout of the conversation would record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.commands.running import Overrides, check_writable, load_run
from agentrl.config import RunConfig
from agentrl.data.files import read_rows
from agentrl.errors import ConfigError, TokenError
from agentrl.processes.watchdog.signals import describe_results, interrupt_note
from agentrl.tokens.renderer import EncodedConversation, Renderer
from agentrl.trainer.config import SftConfig

if TYPE_CHECKING:
    from agentrl.trainer.sft import EncodedExample, SftReport


def sft_command(config: Path, output: Path, /, *overrides: Overrides) -> None:
    """Warm-start a model on conversations (the file's sft section) and write a checkpoint.

    Args:
        config: YAML file that describes the run.
        output: Directory for the new checkpoint; it must not exist.
        overrides: Fields of the file to override, such as --sft.steps 500.
    """
    with interrupt_note(partial(describe_results, output)):
        warm_start(load_run(config, overrides), output)


def warm_start(run: RunConfig, output: Path) -> None:
    """Run the `sft` section of a run file and print the result.

    Raises:
        ConfigError: the section is missing, the output exists or cannot be written, or a line of the data cannot be used.
        TrainError: the loss is not finite, or the output cannot be written.
    """
    if run.sft is None:
        raise ConfigError("sft: the run file has no sft section; add one, with at least `data: conversations.jsonl`")
    check_writable(output, str(output))
    if output.exists():
        raise ConfigError(f"{output} exists; name a directory that does not, or remove it")
    sampling = run.sampling
    renderer = Renderer.load(
        run.model.directory, template_options=sampling.template_options, tool_format=sampling.tool_format
    )
    report = run_sft_with_progress(run.model.directory, output, run.sft, encode_conversations(run.sft.data, renderer))
    print(
        f"{report.steps} steps on {report.tokens} tokens in {report.seconds:.0f} s, "
        f"loss {report.first_loss:.3f} -> {report.last_loss:.3f} nats per token; wrote {report.output_path}"
    )


def encode_conversations(path: str | Path, renderer: Renderer) -> list[EncodedExample]:
    """Return the conversations of a JSONL file as training examples; the loss is on assistant tokens.

    Raises:
        ConfigError: a line cannot be used; the message names file and line.
    """
    conversations: list[EncodedConversation] = []
    for row in read_rows(Path(path)):
        messages, tools = _conversation(row.fields, row.place)
        try:
            encoded = renderer.encode_conversation(messages, tools)
        except TokenError as error:
            raise ConfigError(f"{row.place}: {error}") from error
        mask = encoded.assistant_mask
        if not mask.any() or mask[0]:
            raise ConfigError(
                f"{row.place}: expected an assistant message, with at least one token before it; fix or remove the line"
            )
        conversations.append(encoded)
    if not conversations:
        raise ConfigError(f"{path} holds no conversations; expected one JSON object with `messages` on each line")
    from agentrl.trainer.sft import EncodedExample  # loads torch, for which an error in the data does not wait

    return [EncodedExample(token_ids=item.token_ids, loss_mask=item.assistant_mask) for item in conversations]


def run_sft_with_progress(
    model: str | Path, output: Path, config: SftConfig, examples: Sequence[EncodedExample]
) -> SftReport:
    """Run `run_sft` and return its report; a terminal shows a bar, and a file or pipe gets a line at each tenth."""
    from agentrl.trainer.sft import run_sft

    columns = (
        TextColumn("warm start"),
        BarColumn(),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}, loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("sft", total=config.steps, loss=float("nan"))

        def show(step: int, loss: float) -> None:
            progress.update(bar, completed=step, loss=loss)
            if not console.is_terminal and step * 10 // config.steps > (step - 1) * 10 // config.steps:
                console.print(f"warm start: step {step}/{config.steps}, loss {loss:.3f}", highlight=False)

        return run_sft(model, output, config, examples, on_progress=show)


def _conversation(
    record: Mapping[str, Any], where: str
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
    messages, tools = record.get("messages"), record.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: expected `messages`, a list of chat messages, got {messages!r}; fix or remove the line")
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{where}: expected `tools` to be a list of tool schemas, got {type(tools).__name__}")
    return cast("list[Mapping[str, Any]]", messages), cast("list[Mapping[str, Any]] | None", tools)

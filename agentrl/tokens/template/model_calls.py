"""Decides once, at load, how a model is shown tools and in which form its calls are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.formats import TOOL_FORMATS
from agentrl.tokens.parse import CallLimits, ToolFormat
from agentrl.tokens.template.described_tools import DescribingTemplate
from agentrl.tokens.template.probing import CallStyle, TemplateProber, wants_text_arguments
from agentrl.tokens.template.rendering import ChatTemplate, GuardedTemplate
from agentrl.tokens.template.round_trip import FoundFormat, RoundTrip
from agentrl.tokens.template.written_calls import WritingTemplate
from agentrl.types import ToolFormatName

_DESCRIBING = [name for name, form in TOOL_FORMATS.items() if form.writer]
WITHOUT_TOOLS = (
    "has no tools, so the model would not see them; set `sampling.tool_format: "
    + f"{_DESCRIBING[0]}`, which describes them "
    "in the system message and reads calls from the answers"
)
"""What is said of a template without tools, and the remedy."""


WITHOUT_CALLS = (
    "leaves tool calls out, and its prompt names no known form; set `sampling.tool_format` to the form in which the "
    f"model writes calls, one of {', '.join(name for name, form in TOOL_FORMATS.items() if form.write)}, which are written "
    "as text of its messages"
)
"""The same of a template that shows tools, and no calls."""


class ModelCalls:
    """A chat template with the form of its calls."""

    def __init__(
        self,
        make: Mapping[str, Any],
        control: Mapping[str, int],
        ends: Sequence[str],
        tool_format: ToolFormatName,
        where: str,
    ) -> None:
        """Try out the template that `make` describes.

        Args:
            make: arguments of `ChatTemplate`.
            control: control tokens.
            ends: texts that end a sequence.
            tool_format: form of the calls, or `auto`.
            where: the model, in messages.

        Raises:
            ConfigError: the template cannot render a question and an answer, or not in the form that `tool_format` names.
        """
        self._make, self._control, self._ends, self._where = make, tuple(control), ends, where
        self.form: ToolFormat | None = None
        """The form of the calls; None if there are no tools, or no known form."""
        self.limits = CallLimits()
        self.written_call = ""
        """A made-up call as the template writes it, where no form reads it."""
        self.leaves_out = False
        """Whether the template itself writes no calls."""
        self._take(ChatTemplate(**make))
        chosen = None if tool_format == "auto" else TOOL_FORMATS[tool_format]
        if not self.prober.renders_tools and chosen is not None:
            if chosen.writer is None or chosen.write is None:
                raise ConfigError(
                    f"sampling.tool_format: {tool_format}: the chat template of {where} shows no tools to the model, and "
                    f"this form cannot describe them; of the forms, {', '.join(_DESCRIBING)} can"
                )
            self._take(DescribingTemplate(chosen.writer, chosen.write, make))
        if self.prober.renders_tools:
            self._find(list(TOOL_FORMATS.values()), chosen)
        if chosen is not None and self.form is None:
            raise ConfigError(
                f"sampling.tool_format: {tool_format}: made-up calls do not come back in this form from the chat template "
                f"of {where}, which writes {self.written_call}; leave it at auto, or give the model a template that writes "
                f"{tool_format} calls"
            )

    def _take(self, template: ChatTemplate) -> None:
        self.template = GuardedTemplate(template, self._control)
        self._probe(CallStyle(wants_text_arguments(self.template)))

    def _probe(self, style: CallStyle) -> None:
        self.style = style
        try:
            self.prober = TemplateProber(self.template, style=style, ends=self._ends, controls=self._control)
        except TokenError as error:
            raise ConfigError(f"{self._where}: the chat template cannot render a question and an answer: {error}") from error

    def _find(self, forms: Sequence[ToolFormat], asked: ToolFormat | None) -> None:
        try:
            trip = RoundTrip(self.template, self.prober.ends)
        except TokenError as error:
            self.written_call = f"nothing ({error})"
            return
        found = trip.find(forms if asked is None else [asked], self.style.text_arguments)
        self.leaves_out = found is None and trip.leaves_out_calls()
        if self.leaves_out:
            found = self._find_written([form for form in forms if form.sign in trip.prompt] if asked is None else [asked])
        if found is None:
            self.written_call = trip.sample(self.style.text_arguments)
            return
        self.form, self.limits = found.form, found.limits
        if found.style != self.style:
            self._probe(found.style)

    def _find_written(self, forms: Sequence[ToolFormat]) -> FoundFormat | None:
        """Try forms in which calls can be written as text of the assistant message, and keep the template that does."""
        plain = self.template, self.style, self.prober
        for form in forms:
            if form.write is not None:
                self._take(WritingTemplate(form.write, self._make))
                found = RoundTrip(self.template, self.prober.ends).find([form], text_arguments=False)
                if found is not None:
                    return found
        self.template, self.style, self.prober = plain
        return None

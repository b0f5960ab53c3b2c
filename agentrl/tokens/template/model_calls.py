"""Decides once, at load, how a model is shown tools and in which form its calls are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.formats import TOOL_FORMATS, ToolFormatName
from agentrl.tokens.parse import CallLimits, ToolFormat
from agentrl.tokens.template.described_tools import DescribingTemplate
from agentrl.tokens.template.probing import CallStyle, TemplateProber, wants_text_arguments
from agentrl.tokens.template.rendering import ChatTemplate, GuardedTemplate
from agentrl.tokens.template.round_trip import RoundTrip

_WRITTEN = [name for name, form in TOOL_FORMATS.items() if form.writer]
WITHOUT_TOOLS = (
    "has no tools, so the model would not see them; set `sampling.tool_format: " + f"{_WRITTEN[0]}`, which describes them "
    "in the system message and reads calls from the answers"
)
"""What is said of a template without tools, and the remedy."""


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
        self._control, self._ends, self._where = tuple(control), ends, where
        self.form: ToolFormat | None = None
        """The form of the calls; None if there are no tools, or no known form."""
        self.limits = CallLimits()
        self.written_call = ""
        """A made-up call as the template writes it, where no form reads it."""
        self._take(ChatTemplate(**make))
        asked = None if tool_format == "auto" else TOOL_FORMATS[tool_format]
        if not self.prober.renders_tools and asked is not None:
            if asked.writer is None:
                raise ConfigError(
                    f"sampling.tool_format: {tool_format}: the chat template of {where} shows no tools to the model, and "
                    f"this form cannot describe them; of the forms, {', '.join(_WRITTEN)} can"
                )
            self._take(DescribingTemplate(asked.writer, make))
        if self.prober.renders_tools:
            self._find(list(TOOL_FORMATS.values()) if asked is None else [asked])
        if asked is not None and self.form is None:
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

    def _find(self, forms: Sequence[ToolFormat]) -> None:
        trip = RoundTrip(self.template, self.prober.ends)
        found = trip.find(forms, self.style.text_arguments)
        if found is None:
            self.written_call = trip.sample(self.style.text_arguments)
            return
        self.form, self.limits = found.form, found.limits
        if found.style != self.style:
            self._probe(found.style)

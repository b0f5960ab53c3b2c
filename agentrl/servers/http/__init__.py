"""SGLang's HTTP protocol on top of an engine."""

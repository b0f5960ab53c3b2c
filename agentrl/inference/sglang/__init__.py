"""The client of one SGLang server: model calls, weight updates and process groups over HTTP."""

"""The bundled CPU demo: a multi-turn calculator agent, its tokenizer, its model and its demonstrator."""

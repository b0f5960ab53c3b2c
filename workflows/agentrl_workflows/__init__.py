"""Bundled workflows, their tasks and the demos.

The modules of this folder are the workflows; run files name them. `tasks` reads the files of public data sets and makes word
problems; `coding`, `programming`, `repositories` and `velmara` hold tasks with their data. `calculator`, `math_demo` and
`code_demo` are demos, which `demo` trains and evaluates.
"""

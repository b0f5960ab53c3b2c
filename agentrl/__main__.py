"""`python -m agentrl`: the `agentrl` command, for where its script is not on the path."""

from agentrl.commands.main import main

if __name__ == "__main__":
    main()

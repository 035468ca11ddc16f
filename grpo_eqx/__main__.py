"""`python -m grpo_eqx` is the command `grpo-eqx`."""

from grpo_eqx.cli.main import main

if __name__ == "__main__":
    main()

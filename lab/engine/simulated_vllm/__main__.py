"""Entry of `python3 -m simulated_vllm`, the image's `vllm` command."""

from simulated_vllm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Samplers over inference servers: responses are sampled by vLLM or SGLang, and weights are sent after each step.

- `vllm`, `sglang`: the HTTP interfaces, and the config nodes `models.ROLE.sampler`.
- `settings`, `spec`: the settings that both share.
- `sampler`: the sampler, which turns responses into requests.
- `ranked`: the sampler of a run with several ranks.
- `pool`: routes requests to servers, and survives their failures.
- `delivery`: which weights servers must have, and how they get them.
- `server`: one server: its connection and its state.
- `probe`: compares the weights of servers and trainer.
- `weights`: model folders that servers load.
- `launch`: servers that the run starts and stops.
"""

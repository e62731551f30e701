"""Samplers over inference servers: responses are sampled by vLLM or SGLang, and weights are sent after each step.

- `vllm`, `sglang`: the HTTP interfaces, and the config nodes `models.ROLE.sampler`.
- `server_settings`: the settings that both share.
- `server_sampler`: the samplers of a run with one rank and with several, which turn responses into requests.
- `pool`: routes requests to servers, and survives their failures.
- `weights`: the files that servers load, which all ranks write.
- `worker`: what a server of vLLM imports to take deltas; the format of deltas.
- `delivery`: which weights servers must have, and how they get them.
- `inference_server`: one server: its process, its connection and its state.
- `probe`: compares the weights of servers and trainer.
- `guard`: the script that ends a server, and removes the weights, when the run ends.
"""

"""A run file that is only planned."""

TEXT = """
run: {name: what-if}
training: {task: examples.byte_gpt:task, global_batch: 13, microbatch: 4, steps: 3}
cluster:
  source: file
  profile: none.json
  offers:
    - {pool: a, kind: a100-40, count: 4, devices_per_node: 4, price_per_hour: 1.0}
  links:
    - {within: node, bandwidth_gbytes_per_s: 100}
budget: {average_per_hour_usd: 100}
"""

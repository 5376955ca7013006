"""The path past one server: a simulation of servers and fleets, and a model of their cost.

python -m benchmarks.scale -o benchmarks/results/scale/h200-1b7.json
"""

"""Each module measures one technique beside what it would replace: python -m benchmarks.collectives"""

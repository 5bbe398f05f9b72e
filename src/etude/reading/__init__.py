"""One reader for every kind of configuration file; what a kind's keys mean is its `Dialect`. Imports no torch.

Values follow YAML 1.2: `1e-4` is a number, only `true` and `false` are truth values. A file may build on others
(`defaults:`), refer to its own values (`${training.lr}`) and to the environment (`${env:NAME}`).

    from etude.reading.load import load

    load("red-team.yaml", ["training.lr=1e-4"], RedTeamFile()).config
"""

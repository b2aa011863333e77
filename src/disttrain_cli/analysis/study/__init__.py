"""Operation-level traces of "Understanding Stragglers in Large Model Training Using What-if
Analysis", to a verdict.

Start with `analyze.analyze_study`. `reader` checks the Parquet files and keeps the steps and
replicas that are whole, `graph` says which operation waits for which (Megatron's 1F1B, interleaved
or not, and its collectives), `clocks` puts the ranks on one clock where theirs contradict,
`replays` plays the steps again in the study's own definition, `losses` splits the lost time by
cause as for our own traces, `advice` is what to do, `drawing` what the report shows.
"""

from disttrain_cli.analysis.study.analyze import analyze_study
from disttrain_cli.analysis.study.reader import open_study

__all__ = ["analyze_study", "open_study"]

"""Analysis of the straggler study's operation-level traces.

The study is "Understanding Stragglers in Large Model Training Using What-if Analysis". Start with
`analyze.analyze_study`. `reader` checks the Parquet files and selects complete steps and replicas,
`graph` determines which operation waits for which (Megatron's 1F1B, interleaved or not, and its
collectives), `clocks` puts the ranks on one clock if theirs contradict each other, `replays`
replays the steps in the study's definition, `losses` attributes the lost time to causes as for
disttrain's traces, `advice` gives advice, `drawing` the report's pictures.
"""

from disttrain_cli.analysis.study.analyze import analyze_study
from disttrain_cli.analysis.study.reader import open_study

__all__ = ["analyze_study", "open_study"]

"""Views of operation-level traces are documented like those of the others."""

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.analysis.views import documented_views
from tests.analysis.study import megatron


def test_columns_of_operations_are_documented(tmp_path):
    file = megatron.write(tmp_path / "t.parquet", megatron.rows(megatron.Job(steps=1)))
    (view,) = documented_views("study").values()
    assert ask([file], "SELECT * FROM operations LIMIT 1").columns == list(view.columns)
    assert dict(ask([file], 'SELECT "column", meaning FROM columns').rows) == view.columns

"""Tables, charts and the HTML report, from records and nothing else."""

from hybridtf.report.charts import save_charts
from hybridtf.report.documents import write_latex, write_markdown
from hybridtf.report.html import write_report
from hybridtf.report.table import Column, Table
from hybridtf.report.tables import compare_table

__all__ = ["Column", "Table", "compare_table", "save_charts", "write_latex", "write_markdown", "write_report"]

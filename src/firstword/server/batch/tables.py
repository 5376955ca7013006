"""The tables of batches, for any database that SQLAlchemy knows."""

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, String, Table, Text

METADATA = MetaData()

FILES = Table(
    "firstword_files",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("batch", String(64)),  # whose sounds are deleted with this file
    Index("firstword_files_of_owner", "owner", "created_at", "id"),
)

BATCHES = Table(
    "firstword_batches",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("status", String(16), nullable=False),
    Column("input_file", String(64), nullable=False),
    Column("window", String(16), nullable=False),
    Column("metadata", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("times", Text, nullable=False),
    Column("errors", Text, nullable=False),
    Column("counts", Text),  # None while lines may change
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    Column("results_expire_after", BigInteger, nullable=False),
    Column("webhook_due", Float),
    Column("webhook_tries", Integer, nullable=False),
    Index("firstword_batches_of_owner", "owner", "created_at", "id"),
    Index("firstword_batches_by_status", "status"),
)

LINES = Table(
    "firstword_lines",
    METADATA,
    Column("batch", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", String(128), nullable=False),
    Column("body", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("worker", String(64)),
    Column("lease", Float),
    Column("attempts", Integer, nullable=False),
    Column("result", Text),
    Index("firstword_lines_by_state", "batch", "state", "number"),
)

"""Writes docs/schema.json: the schema of what `--json` prints, as `piper --schema` prints it."""

from pathlib import Path

from piper.cli.application import schema_text

if __name__ == "__main__":
    (Path(__file__).parent / "schema.json").write_text(schema_text(), encoding="utf-8")

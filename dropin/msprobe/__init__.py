"""msprobe, answered by ulpscope."""

from ulpscope.compat.beside import refuse_beside

refuse_beside("mindstudio-probe", "msprobe")

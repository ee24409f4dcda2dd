// Stands in for CuTe's printing helpers: the instruction layer prints nothing.
#pragma once

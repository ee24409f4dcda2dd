// Stands in for the wgmma shapes of other widths than 8, 16, 32, 64, 96, 128, 192 and 256: 2.8 MB of text.
#pragma once

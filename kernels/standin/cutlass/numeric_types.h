// Stands in for CUTLASS's numeric types, which cute/arch/copy_sm90_desc.hpp needs on the host only.
#pragma once

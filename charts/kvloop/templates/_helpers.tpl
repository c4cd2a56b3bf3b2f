{{- define "kvloop.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name of all that the operator itself consists of. */}}
{{- define "kvloop.operator" -}}
{{- include "kvloop.fullname" . }}-operator
{{- end -}}

{{- define "kvloop.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvloop.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the account to use, since serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What selects the operator's pods; it never changes over a release's life. */}}
{{- define "kvloop.selector" -}}
app.kubernetes.io/name: kvloop-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvloop.labels" -}}
{{- $own := fromYaml (include "kvloop.selector" .) -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_") -}}
{{- toYaml $own -}}
{{- end -}}

{{/*
Labels and annotations of an object. Takes the root and, if it has any, labels and annotations of the object's own.
What selects and identifies stands above what the object has, and that above what all have in common.
*/}}
{{- define "kvloop.metadata" -}}
{{- $labels := merge (fromYaml (include "kvloop.labels" .root)) (default dict .labels) .root.Values.commonLabels -}}
labels: {{- toYaml $labels | nindent 2 }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Takes an image and the tag that it has unless it says another. */}}
{{- define "kvloop.image" -}}
{{- with .image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .tag .image.tag }}{{ end -}}
{{- end -}}

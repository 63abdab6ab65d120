from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0018_logs_of_failed_attempts")]

    operations = [
        migrations.AddField(
            model_name="transportmessage",
            name="deliveries",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="Times it was begun since its last durable outcome.",
            ),
        ),
        migrations.AddField(
            model_name="transportmessage",
            name="worker",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="Token of the worker that runs it.",
                max_length=64,
            ),
        ),
    ]
